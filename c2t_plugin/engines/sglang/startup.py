"""What a server process serves with, made once its memory is, and completed once its attention backends are."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os.path
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sglang
import torch
from sglang.srt.environ import envs

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.config import AUTO, CALIBRATE, LAGGED, LOWER, NETWORK, OFF, ON, STRICT, THRESHOLDS, C2TConfig
from c2t_plugin.engines.checkpoints import classifier_kind, find_classifier, load_fitting_classifier, warn_of_kind
from c2t_plugin.engines.sglang import args
from c2t_plugin.engines.sglang.metrics import Counts, Exporter, publish_learnt
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.planner import CostCurve, switched_depths
from c2t_plugin.planner.step_planner import StepPlanner

if TYPE_CHECKING:
    from c2t_plugin.engines.sglang.parts import Scorer

logger = logging.getLogger(__name__)


def prepare(
    server_args: Any,
    base: str,
    make_scorer: Callable[[NodeClassifier, float, C2TConfig], Scorer],
    *,
    most: int,
    topk: int,
    leads: bool,
    alone: bool = True,
) -> Parts:
    """For one rank; `leads`: it reports and records; `alone`: it is the only one. most: how many draft tokens of a
    request can be verified. topk: of a draft pass, which SGLang 0.5.23 does not write into the arguments."""
    config = args.config_of(server_args)
    draft = server_args.speculative_draft_model_path
    kind = classifier_kind(base, draft, server_args.model_path)
    revision = args.draft_revision(server_args)
    path, origin = find_classifier(config, kind, draft, revision=revision, probabilities=config.plans_chains)
    classifier = load_fitting_classifier(path, config)
    spec = classifier.spec
    if leads and config.policy == "c2t":
        warn_of_kind(logger, path, spec, kind)
    thresholded = config.policy in THRESHOLDS and not config.planned
    beta = spec.suggested_beta if config.beta is None and thresholded else config.beta
    # a planner cuts what the threshold leaves
    scorer = make_scorer(classifier, 0.0 if beta is None else beta, config)
    scorer.lower = config.request_settings == LOWER
    d_max = scorer.d_max
    exporter = recorder = None
    if leads and config.trace_dir is not None:
        from c2t_plugin.engines.sglang import recording

        recorder = recording.start(config, server_args, kind, top_m=spec.top_m, d_max=d_max)
    if leads and server_args.enable_metrics:
        # 0.5.23 leaves the record as it was written, and resolves the name elsewhere
        exporter = Exporter({"model_name": server_args.served_model_name or server_args.model_path})
    configuration = {
        **dataclasses.asdict(config),
        "base": base,
        "d_max": d_max,
        "beta": beta,
        "planner": config.planner if config.planner != AUTO else ON if config.planned else OFF,
        "classifier": str(path),
        "classifier_origin": origin,
        "features": spec.features,
        "top_m": spec.top_m,
    }
    _log(configuration, scorer.shape)
    if leads and envs.SGLANG_RUST_SERVER.get():
        from c2t_plugin.engines.sglang.unplugged import RUST

        logger.warning("C2T: %s", RUST)
    if config.learn in (CALIBRATE, NETWORK) and leads:
        from c2t_plugin.engines import learning

        learning.warn_unless_learnt(config)
    # Kernels of other devices run when they have time, some of them out of a graph: the host's clock knows nothing.
    counts = Counts(most, exporter, classifier_s=0.0 if scorer.beta.device.type == "cpu" else None)
    given = server_args, base, config, scorer, classifier, counts
    planner = _planner(*given, most=most, topk=topk, leads=leads, alone=alone)
    if planner is not None and planner.learns and exporter is not None:
        planner.listeners.append(functools.partial(publish_learnt, exporter))
    return Parts(scorer, counts, recorder, planner, configuration)


def complete(worker: Any, config: C2TConfig) -> Any:
    """Choose what the target computes, and have SGLang capture its graphs for that. Said in the log.

    worker: SGLang's, whose attention backends exist and whose graphs do not. Returns what stands in the place of the
    controller of SGLang's `--speculative-adaptive`; None: nothing does.
    """
    from c2t_plugin.engines.sglang import ranks
    from c2t_plugin.engines.sglang.drafters.depths import DepthSwitch
    from c2t_plugin.engines.sglang.verify import choice

    parts, planner = worker.c2t, worker.c2t.planner
    packing = parts.packing = choice.start(config, worker.server_args, worker.target_worker)
    verifier = choice.verifier(worker.target_worker.model_runner.attn_backend)
    parts.configuration["attention"] = getattr(verifier, "c2t_kernel", "stock")
    parts.configuration["packing"] = "off" if packing is None else packing.backend
    if config.mode == "chain" or config.rows == LAGGED or planner is not None:
        from c2t_plugin.engines.sglang.verify import lagged

        parts.lagged = lagged.start(config, packing, parts.scorer, worker.req_to_token_pool.size, planner)
    if config.mode == "tree" and planner is not None:
        worker._draft_worker.drafter.vary_shapes(packed=packing is not None)
    parts.configuration["rows"] = "sync" if parts.lagged is None else LAGGED
    if ranks.apart():
        from c2t_plugin.engines.sglang import dp_attention

        parts.together = dp_attention.start(worker, config)
    if planner is not None:
        planner.context = lambda: sum(req.seqlen for req in worker._reqs)
    controller: Any
    if planner is not None and planner.depths:
        # elsewhere a depth has graphs of its own
        can_end = worker.device == "cpu" and ranks.alone()
        controller = DepthSwitch(worker, range(parts.scorer.d_max + 1) if can_end else planner.depths)
        if can_end:
            from c2t_plugin.engines.sglang.drafters import host

            parts.ends = host.ending(worker, controller.switch)
        from c2t_plugin.engines.sglang import behind

        parts.behind = behind.start(worker)
        planner.skips = parts.behind is not None
    else:
        from c2t_plugin.engines.sglang.verify import windows

        controller = parts.windows = windows.start(config, worker.server_args, worker, packed=packing is not None)
        parts.configuration["widths"] = None if parts.windows is None else parts.windows.widths
    if planner is not None and packing is not None:
        planner.packed, planner.sizes = True, packing.sizes
    elif planner is not None:
        planned = "plans the draft's depth alone" if planner.depths else "verifies every node"
        logger.warning("C2T: the planner %s, since the whole window is computed anyway", planned)
    return controller


def prove(worker: Any, config: C2TConfig, capture: Callable[[], None]) -> None:
    """The self-check of a worker whose graphs are captured; see proof/report.py. Then no kernel is left to compile."""
    if config.self_check in (ON, STRICT) or (config.self_check == AUTO and str(worker.device).startswith("cuda")):
        from c2t_plugin.engines.sglang.proof import report

        report.at_start(worker, config, capture)
    if str(worker.device).startswith("cuda"):
        from c2t_plugin.engines.sglang import warm_up

        warm_up.every_form(worker)


# Of the argument record what the seconds of a step depend on. Not every release has each.
_COSTS = (
    *("dtype", "quantization", "kv_cache_dtype", "page_size", "attention_backend", "prefill_attention_backend"),
    *("decode_attention_backend", "speculative_attention_mode", "speculative_draft_attention_backend"),
    *("sampling_backend", "moe_runner_backend", "moe_a2a_backend", "speculative_moe_runner_backend"),
    *("speculative_draft_model_quantization", "tp_size", "dp_size", "attn_dp_size", "ep_size", "max_running_requests"),
    *("disable_cuda_graph", "disable_decode_cuda_graph", "cuda_graph_bs", "cuda_graph_bs_decode", "cuda_graph_max_bs"),
    *("cuda_graph_max_bs_decode", "enable_torch_compile", "disable_overlap_schedule", "enable_deterministic_inference"),
    *("speculative_num_steps", "speculative_num_draft_tokens", "speculative_eagle_topk"),
)
_RESOLVED = ("base", "mode", "policy", "attention", "packing", "rows", "verify_attention")


def remember(worker: Any, config: C2TConfig) -> None:
    """Have a planner that measures begin with what such a server has measured before. worker: as it serves."""
    from c2t_plugin.engines.sglang import ranks

    parts, given = worker.c2t, worker.server_args
    if parts.planner is None or not parts.planner.measures or config.curve is not None:
        # a file that is named holds
        return
    from c2t_plugin.engines import curve_cache

    draft = given.speculative_draft_model_path
    facts = {
        "engine": f"SGLang {sglang.__version__}",
        "target": curve_cache.checkpoint(given.model_path, getattr(given, "revision", None)),
        "draft": curve_cache.checkpoint(draft, args.draft_revision(given)),
        "backend": type(worker.target_worker.model_runner.attn_backend).__name__,
        "depths": parts.planner.depths,
        **{name: parts.configuration[name] for name in _RESOLVED},
        **{name: getattr(given, name, None) for name in _COSTS},
    }
    curve_cache.start(parts.planner, torch.device(worker.device), facts, writes=ranks.leads())


def _planner(
    server_args: Any,
    base: str,
    config: C2TConfig,
    scorer: Scorer,
    classifier: NodeClassifier,
    counts: Counts,
    *,
    most: int,
    topk: int,
    leads: bool,
    alone: bool,
) -> StepPlanner | None:
    if not config.planned:
        return None
    learns = config.learn != OFF and config.mode == "chain"
    if learns and getattr(server_args, "enable_deterministic_inference", False):
        logger.warning("C2T: learns nothing: enable_deterministic_inference, and what is learnt is other requests'")
        learns = False
    if config.policy == "c2t" and not learns and classifier.spec.training.get("calibrated") != config.mode:
        logger.warning(
            "C2T: the planner takes confidences for probabilities, and this classifier's were not made that on %ss: "
            "`c2t calibrate --on %s` does that",
            *(config.mode, config.mode),
        )
    shape: dict[str, Any] = {"steps": scorer.d_max, "most": most, "device": scorer.beta.device}
    curve, path = load_curve(config), config.curve if leads else None
    if config.mode == "tree":
        from c2t_plugin.planner.tree_planner import TreePlanner

        return TreePlanner(curve, path, **shape, topk=topk)
    shape["depths"] = switched_depths(scorer.d_max)
    if not learns:
        return StepPlanner(curve, path, **shape)
    kind: Callable[..., StepPlanner] = StepPlanner
    if scorer.beta.device.type == "cpu" and alone:
        # what a server on a GPU does not load
        from c2t_plugin.engines.sglang.drafters import host

        kind = functools.partial(host.planner, scorer, lambda: counts.classifier_s or 0.0)
    # by servers that learn alone
    from c2t_plugin.engines import learning

    pair = pair_of(server_args, base)
    learner: Any
    if learning.trains(config):
        from c2t_plugin.engines import learned

        learner = learned.network(config, classifier, scorer.d_max, pair, leads=leads)
        # chains are scored by the network in force, now and later
        learner.follow(lambda new: scorer.take([torch.from_numpy(each) for each in new]))  # type: ignore[union-attr]
    else:
        learner = learning.calibration(config, classifier, scorer.d_max, pair)
    planner = kind(curve, path, **shape, calibration=learner)
    if leads:
        learning.report(planner, config.learned, classifier, pair)
    return planner


def pair_of(server_args: Any, base: str) -> Callable[[], dict[str, Any]]:
    """See learning.pair_of; computed once, when it is first asked for."""
    from c2t_plugin.engines.learning import pair_of

    draft, target = server_args.speculative_draft_model_path, server_args.model_path
    revisions = getattr(server_args, "revision", None), args.draft_revision(server_args)
    kind = classifier_kind(base, draft, target)
    return functools.cache(lambda: pair_of(kind, (target, revisions[0]), (draft, revisions[1])))


def load_curve(config: C2TConfig) -> CostCurve | None:
    """The cost curve of the options; None if there is none yet. Raises ConfigError for a file that is none."""
    if config.curve is None or not os.path.exists(config.curve):
        return None
    from c2t_plugin.planner.curve_file import read_curve

    return read_curve(config.curve)


def _log(found: dict[str, Any], shape: str) -> None:
    rule = f", policy {found['policy']}" if found["mode"] == "tree" else ""
    beta = "" if found["beta"] is None else f", beta {found['beta']}"
    beta += "" if found["planner"] == OFF else f", planner {found['planner']}"
    said = f"C2T: base {found['base']}, {shape}{rule}{beta}"
    if found["policy"] != "c2t":
        logger.info("%s", said)
        return
    features = f"features {', '.join(found['features'])}, top-M {found['top_m']}"
    logger.info("%s, classifier %s (%s; %s)", said, found["classifier"], found["classifier_origin"], features)
    if found["classifier_origin"].startswith("shipped"):
        logger.warning("C2T: this classifier was fitted on another pair; fit your own: c2t collect, then c2t fit")
