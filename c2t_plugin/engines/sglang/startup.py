"""What a worker needs of C2T, made once its memory is."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.config import AUTO, THRESHOLDS, C2TConfig
from c2t_plugin.engines.checkpoints import find_classifier, load_fitting_classifier
from c2t_plugin.engines.served_traces import start_recorder
from c2t_plugin.engines.sglang import args
from c2t_plugin.engines.sglang.checkpoints import classifier_kind
from c2t_plugin.engines.sglang.metrics import Counts, Exporter
from c2t_plugin.engines.sglang.planning import StepPlanner
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner import CostCurve, switched_depths
from c2t_plugin.scorer import ChainScorer
from c2t_plugin.traces.recorder import TraceRecorder

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Made:
    """configuration: every option as it was resolved."""

    scorer: ChainScorer
    counts: Counts
    recorder: TraceRecorder | None
    planner: StepPlanner | None
    configuration: dict[str, Any]


def prepare(
    server_args: Any,
    base: str,
    make_scorer: Callable[[NodeClassifier, float, C2TConfig], ChainScorer],
    *,
    most: int,
    leads: bool,
) -> Made:
    """For one rank; `leads`: it reports and records. most: how many draft tokens of a request can be verified."""
    config = args.config_of(server_args)
    draft = server_args.speculative_draft_model_path
    kind = classifier_kind(base, draft, server_args.model_path)
    path, origin = find_classifier(config, kind, draft, probabilities=config.plans_chains)
    classifier = load_fitting_classifier(path, config)
    spec = classifier.spec
    beta = spec.suggested_beta if config.beta is None and config.policy in THRESHOLDS else config.beta
    # the planner cuts what the threshold leaves
    scorer = make_scorer(classifier, 0.0 if beta is None or beta == AUTO else float(beta), config)
    d_max = scorer.d_max
    exporter = recorder = None
    if leads and config.trace_dir is not None:
        recorder = start_recorder(
            config.trace_dir,
            config.trace_share,
            command="sglang.launch_server",
            base=kind,
            target=server_args.model_path,
            draft=draft or server_args.model_path,
            top_m=spec.top_m,
            d_max=d_max,
        )
    if leads and server_args.enable_metrics:
        # 0.5.23 leaves the record as it was written, and resolves the name elsewhere
        exporter = Exporter({"model_name": server_args.served_model_name or server_args.model_path})
    configuration = {
        **dataclasses.asdict(config),
        "base": base,
        "d_max": d_max,
        "beta": beta,
        "classifier": str(path),
        "classifier_origin": origin,
        "features": spec.features,
        "top_m": spec.top_m,
    }
    _log(configuration, scorer.shape)
    planner = _planner(config, scorer, spec, most) if beta == AUTO else None
    # Kernels of other devices run when they have time, some of them out of a graph: the host's clock knows nothing.
    counts = Counts(most, exporter, classifier_s=0.0 if scorer.beta.device.type == "cpu" else None)
    return Made(scorer, counts, recorder, planner, configuration)


def _planner(config: C2TConfig, scorer: ChainScorer, spec: ClassifierSpec, most: int) -> StepPlanner:
    if config.policy == "c2t" and spec.training.get("calibrated") != config.mode:
        logger.warning(
            "C2T: beta auto takes confidences for probabilities, and this classifier's were not made that on %ss: "
            "`c2t calibrate --on %s` does that",
            *(config.mode, config.mode),
        )
    path = None if config.cost_curve is None else Path(config.cost_curve)
    # a tree's loop is captured as a whole
    switched = switched_depths(scorer.d_max) if config.mode == "chain" else ()
    shape: dict[str, Any] = {"steps": scorer.d_max, "most": most, "device": scorer.beta.device}
    return StepPlanner(load_curve(config), path, **shape, depths=switched)


def load_curve(config: C2TConfig) -> CostCurve | None:
    """The cost curve of the options; None if there is none yet. Raises ConfigError for a file that is none."""
    if config.cost_curve is None or not Path(config.cost_curve).exists():
        return None
    return CostCurve.load(Path(config.cost_curve))


def check_curve(config: C2TConfig) -> None:
    """Raises ConfigError if the cost curve can neither be read nor be made."""
    if load_curve(config) is None and config.cost_curve is not None and not Path(config.cost_curve).parent.is_dir():
        raise ConfigError(f"cost_curve {config.cost_curve!r} is not there, and neither is its directory to make it in")


def _log(found: dict[str, Any], shape: str) -> None:
    rule = f", policy {found['policy']}" if found["mode"] == "tree" else ""
    beta = "" if found["beta"] is None else f", beta {found['beta']}"
    if found["policy"] != "c2t":
        logger.info("C2T: base %s, %s%s%s", found["base"], shape, rule, beta)
        return
    logger.info(
        "C2T: base %s, %s%s%s, classifier %s (%s; features %s, top-M %d)",
        *(found["base"], shape, rule, beta, found["classifier"], found["classifier_origin"]),
        ", ".join(found["features"]),
        found["top_m"],
    )
    if found["classifier_origin"].startswith("shipped"):
        logger.warning("C2T: this classifier was fitted on another pair; fit your own: c2t collect, then c2t fit")
