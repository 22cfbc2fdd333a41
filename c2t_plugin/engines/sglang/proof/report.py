"""What came of the self-check: a line in the log, the server's state, and what is done without."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from c2t_kernels.attention.arguments import HEAD_DIMS
from c2t_kernels.twins import TWINS, compute_in_torch
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.config import OFF, STRICT, TREE_ATTENTION, C2TConfig
from c2t_plugin.engines.sglang import args, ranks
from c2t_plugin.engines.sglang.proof.drafted import compare, words_of
from c2t_plugin.engines.sglang.proof.packed import Findings, prove
from c2t_plugin.engines.sglang.verify.choice import verifier
from c2t_plugin.errors import ConfigError
from c2t_plugin.kernel_checks import Checked, Shapes, check

logger = logging.getLogger(__name__)

_DP = "DP attention, where each pass takes all ranks"


def at_start(worker: Any, config: C2TConfig, capture: Callable[[], None]) -> None:
    """Prove what this server computes; have torch compute what a kernel does wrong here, and verify the uniform window
    if packed rows are wrong.

    capture: has SGLang capture the graphs of draft and depths. Raises ConfigError for what fails, if the check is
    strict.
    """
    place, strict = device_name(worker.device), config.self_check == STRICT
    checked = list(check(_shapes(worker), trees=config.mode == "tree"))
    wrong = _wrong_kernels(worker, checked)
    packs = [line for name, line in wrong.items() if name not in TWINS]
    if len(wrong) > len(packs) and not strict:
        _compute_in_torch(worker, {name: line for name, line in wrong.items() if name in TWINS}, place, capture)
    draft = _drafted(worker)
    found = Findings(skipped=_DP if ranks.apart() else "", failures=packs)
    if worker.c2t.packing is not None and not ranks.apart() and not packs:
        found = prove(worker, whole=strict)
    # what is served is to be what was compared
    found.failures += found.untried() if strict else []
    failed = not ranks.all_hold(not found.failures)
    if failed and not found.failures:
        found.failures.append("another rank found a fault")
    kernels, off = list(wrong.values()), [draft["off"]] if "off" in draft else []
    figures = {each.name: each._asdict() for each in checked}
    state = {**found.state(), "kernels": kernels, "checked": figures, "draft": draft, "device": place}
    if (failed or wrong or off) and strict:
        faults = dict.fromkeys([*found.failures, *kernels, *off])
        raise ConfigError(
            f"self-check on {place}: {'; '.join(faults)}; start with --speculative-c2t-packing off, "
            "or with --speculative-c2t-self-check auto, which does without what is wrong by itself"
        )
    if off:
        logger.warning(
            "C2T: self-check on %s: %s. Drafts may be cut in the wrong places; the output stays the target's",
            *(place, off[0]),
        )
    if failed:
        kind = type(verifier(worker.target_worker.model_runner.attn_backend)).__name__
        logger.warning(
            "C2T: self-check on %s: packed verification on %s is wrong: %s. The uniform window is verified",
            *(place, kind, "; ".join(found.failures)),
        )
        _unpack(worker, capture)
    elif worker.c2t.packing is not None and (found.skipped or not found.proved):
        why = found.skipped or f"{found.seconds:.1f} s went before the first of {found.tiers} sizes"
        logger.warning("C2T: self-check on %s: packed verification was not tried: %s", place, why)
    elif worker.c2t.packing is not None:
        behind = "" if found.poison is None else f", with {found.poison:g} in all that it may not read"
        logger.info(
            "C2T: self-check on %s: packed verification is the uniform window's, off by %.3g, allowed %.3g, in %d of "
            "%d sizes%s, %.1f s%s",
            *(place, found.worst, found.allowed, found.proved, found.tiers, behind, found.seconds, _times(found)),
        )
    if not failed and worker.c2t.planner is not None and found.microseconds:
        worker.c2t.planner.seed({rows: 1e-6 * each for rows, each in found.microseconds.items()})
    worker.c2t.configuration["self_check"] = state
    if str(worker.device).startswith("cuda"):
        torch.cuda.empty_cache()


def _times(found: Findings) -> str:
    """How packed passes and those over whole windows of the same requests compare, where both were timed."""
    shares = [each / found.window_microseconds[rows] for rows, each in found.microseconds.items()]
    if not shares:
        return ""
    return f"; packed passes take {min(shares):.2f} to {max(shares):.2f} of the time of the same requests' windows"


def _wrong_kernels(worker: Any, checked: list[Checked]) -> dict[str, str]:
    """Those that this server runs and that are wrong on any of its ranks, all of which have to compute the same: what
    is said of each."""
    kernel = getattr(verifier(worker.target_worker.model_runner.attn_backend), "c2t_kernel", "")
    runs = {"pack_ragged": worker.c2t.packing is not None, "tree_attention": kernel == TREE_ATTENTION}
    wrong = {}
    for each in checked:
        if runs.get(each.name, True) and not ranks.all_hold(each.ok):
            wrong[each.name] = f"{each.name} {'is wrong on another rank' if each.ok else each}"
    return wrong


def _compute_in_torch(worker: Any, wrong: dict[str, str], place: str, capture: Callable[[], None]) -> None:
    """In the place of these kernels; graphs of the draft hold them."""
    logger.warning(
        "C2T: self-check on %s: Triton kernel %s. torch computes that, more slowly", place, "; ".join(wrong.values())
    )
    for name in wrong:
        compute_in_torch(name)
    _start_over(worker, capture)


def _drafted(worker: Any) -> dict[str, Any]:
    """compared: drafts whose statistics out of a graph were compared with eager ones. off: what is wrong with them.
    untried: why there was no draft, which is no fault: it would have been no request's."""
    if ranks.apart():
        logger.info("C2T: self-check: statistics out of the draft's graph were not tried: %s", _DP)
        return {"compared": 0, "untried": _DP}
    try:
        off, compared = compare(worker)
    except Exception as failure:  # whatever a draft of an unknown kind asks of its batch
        untried = f"{type(failure).__name__}: {failure}"
        logger.info("C2T: self-check: statistics out of the draft's graph were not tried: %s", untried)
        return {"compared": 0, "untried": untried}
    return {"compared": compared} | ({} if off is None else {"off": off})


def device_name(device: str) -> str:
    """For a report."""
    return torch.cuda.get_device_name() if str(device).startswith("cuda") else str(device)


def _shapes(worker: Any) -> Shapes:
    """Of this server, as far as the kernels' shapes follow from it."""
    target, scorer = worker.target_worker.model_runner, worker.c2t.scorer
    layer = next((each for each in target.model.modules() if isinstance(each, RadixAttention)), None)
    fits = layer is not None and layer.qk_head_dim in HEAD_DIMS
    heads = (layer.tp_q_head_num, layer.tp_k_head_num) if layer is not None and fits else (8, 2)
    # trees of some policies have none
    network = getattr(scorer, "network", None) or getattr(getattr(scorer, "policy", None), "network", None)
    return Shapes(
        torch.device(worker.device),
        network or NodeClassifier(ClassifierSpec()).network(worker.device),
        vocabulary=words_of(worker._draft_worker),
        requests=min(worker.req_to_token_pool.size, 64),
        width=max(worker.speculative_num_draft_tokens, 3),
        dtype=target.dtype,
        top_m=worker.c2t.configuration["top_m"],
        topk=worker.topk,
        heads=heads,
        head_dim=layer.qk_head_dim if layer is not None and fits else HEAD_DIMS[0],
    )


def _unpack(worker: Any, capture: Callable[[], None]) -> None:
    """Start over from the attention backends, with the uniform window in the place of packed rows."""
    args.override(worker.server_args, "packing", OFF)
    worker.target_worker.model_runner.spec_algorithm.packing = None
    os.environ.pop("SGLANG_RAGGED_VERIFY_MODE", None)
    if worker.c2t.planner is not None:
        worker.c2t.planner.verify_windows()
    _start_over(worker, capture)


def _start_over(worker: Any, capture: Callable[[], None]) -> None:
    """Have backends and graphs made anew."""
    target = worker.target_worker
    # Their graphs go before others come: there may be memory for one of the two only.
    worker.adaptive_controller = target.model_runner.decode_cuda_graph_runner = None
    gc.collect()
    target.init_attention_backends()
    worker.init_attention_backends()
    target.init_cuda_graphs()
    capture()
