"""Whether `tree_attention` can verify on a target, and whether it is to: asked once, at start."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.runtime_context import get_spec

from c2t_kernels.attention.arguments import HEAD_DIMS
from c2t_plugin.engines.sglang import ranks
from c2t_plugin.engines.sglang.verify import contest
from c2t_plugin.engines.sglang.verify.tree_attention import as_stock, refused

logger = logging.getLogger(__name__)

# by heads, dtype and device: whether it has won there
_VERDICTS: dict[Any, bool] = {}


def wins(runner: Any) -> bool:
    """Whether it is to verify on this target and GPU, on all ranks and at all depths; the log says why."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    obstacle = unfit(runner)
    if obstacle is not None:
        logger.info("C2T: attention stock verifies: %s", obstacle)
        return False
    layer = next(each for each in runner.model.modules() if isinstance(each, RadixAttention))
    heads = contest.Heads(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
    held = heads, runner.dtype, str(runner.device)
    if held not in _VERDICTS:
        width = get_spec().speculative_num_draft_tokens  # of the deepest depth, whose backends come first
        won = contest.won(as_stock, extend_attention_fwd, heads, width, runner.dtype, torch.device(runner.device))
        _VERDICTS[held] = bool(ranks.agree_on(int(won)))
    return _VERDICTS[held]


def refuse_unfit(runner: Any) -> None:
    """Raises ConfigError if the target's attention is not what `tree_attention` computes, as far as its layers say."""
    obstacle = unfit(runner)
    if obstacle is not None:
        raise refused(obstacle)


def unfit(runner: Any) -> str | None:
    """Why `tree_attention` cannot compute the target's attention, as far as its layers say."""
    if runner.kv_cache_dtype != runner.dtype:
        return f"the target computes in {runner.dtype} and keeps keys and values in {runner.kv_cache_dtype}"
    for layer in runner.model.modules():
        obstacle = _obstacle(layer) if isinstance(layer, RadixAttention) else None
        if obstacle is not None:
            return f"layer {layer.layer_id} of the target has {obstacle}"
    return None


def _obstacle(layer: RadixAttention) -> str | None:
    if layer.qk_head_dim not in HEAD_DIMS or layer.v_head_dim != layer.qk_head_dim:
        dims = ", ".join(map(str, HEAD_DIMS))
        return f"heads of {layer.qk_head_dim} for keys and {layer.v_head_dim} for values, not of one of {dims}"
    found = (
        (layer.attn_type != AttentionType.DECODER or layer.is_cross_attention, "attention that is not causal"),
        (layer.logit_cap > 0, "a logit cap"),
        (layer.sliding_window_size > -1, "a sliding window"),
        (layer.xai_temperature_len > 0, "a temperature by length"),
        # every fp8 checkpoint has some, of 1 where it says nothing else
        ({layer.k_scale_float, layer.v_scale_float} - {None, 1.0}, "scaled keys and values"),
    )
    return next((what for present, what in found if present), None)
