"""The packed Triton backend with `tree_attention` in place of SGLang's extend kernel, where a verify forward is packed.

SGLang's own code still writes keys and values to the pool and makes the metadata and the output. Only the kernel that
it calls last is another, with the same arguments but for the mask: `tree_attention` reads the nodes' own columns alone,
so that in tree mode nobody writes a mask over the prefix, and the buffer of captured graphs has no room for one.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from c2t_kernels.attention.arguments import HEAD_DIMS
from c2t_kernels.attention.kernel import tree_attention
from c2t_plugin.config import TREE_ATTENTION
from c2t_plugin.engines.sglang.verify.triton import PackedTritonAttnBackend
from c2t_plugin.errors import ConfigError

logger = logging.getLogger(__name__)

# With these arguments SGLang's kernel computes what tree_attention does.
_PLAIN: dict[str, Any] = {
    "causal": True,
    "k_scale": 1.0,
    "v_scale": 1.0,
    "logit_cap": 0.0,
    "sliding_window_size": -1,
    "sinks": None,
    "window_kv_offsets": None,
    "xai_temperature_len": -1,
    "score_mod": None,
    "aux_tensors": None,
}
# Whatever these are, it computes the same.
_IGNORED = ("page_size", "extend_seq_lens_cpu")


class TreeTritonAttnBackend(PackedTritonAttnBackend):
    """masked: whether verified rows are trees, whose mask SGLang then gets without the prefix's columns. asked_for: not
    chosen by `auto`, which leaves chains of a layer that it cannot compute to SGLang's kernel."""

    c2t_kernel = TREE_ATTENTION
    # whether its masks have no columns of the prefix
    c2t_nodes_alone = False
    _masked, _asked_for = False, True
    extend_attention_fwd: Any

    def __init__(self, runner: Any, *, masked: bool, asked_for: bool = True) -> None:
        super().__init__(runner)
        self._masked, self._asked_for, self.c2t_nodes_alone = masked, asked_for, masked
        self._stock_kernel = self.extend_attention_fwd
        self.extend_attention_fwd = torch.compiler.disable(self._attend)
        if masked:
            # without graphs nobody needs a buffer, but its form is asked for
            self._verify_mask = self._mask_buffer(0, 0)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *positional: Any, **keyword: Any) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens, *positional, **keyword)
        if self._masked and self._verify_mask is not None:
            self._verify_mask = self._mask_buffer(max_bs, max_num_tokens)

    def _mask_buffer(self, requests: int, rows: int) -> VerifyMask:
        width = self.num_draft_tokens
        # SGLang captures with a mask over a prefix of one token for each request, which has to fit as well
        elements = (requests + max(rows, requests * width)) * width
        buffer = torch.zeros(elements, dtype=torch.uint8, device=self.device)
        return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=requests)

    def _mask_columns(self, prefix: Tensor, rows: Tensor) -> Tensor:
        return rows

    def _attend(self, *arguments: Any, **options: Any) -> None:
        """In place of SGLang's extend kernel, with its arguments, in every forward pass but decoding."""
        if not self._packed:
            self._stock_kernel(*arguments, **options)
            return
        *_, causal, _, _, k_scale, v_scale, _ = arguments
        asked = {**options, "causal": causal, "k_scale": k_scale, "v_scale": v_scale}
        odd = [name for name, value in asked.items() if not _fits(name, value)]
        if not odd:
            as_stock(*arguments)
        elif self._masked or self._asked_for:
            raise _refused(f"a layer of the target attends with {', '.join(odd)}")
        else:
            self._stock_kernel(*arguments, **options)


# by heads, dtype and device: whether it has won there
_VERDICTS: dict[Any, bool] = {}


def wins(runner: Any) -> bool:
    """Whether it is to verify on this target and GPU, on all ranks and at all depths; the log says why."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    from c2t_plugin.engines.sglang import ranks
    from c2t_plugin.engines.sglang.verify import contest

    obstacle = unfit(runner)
    if obstacle is not None:
        logger.info("C2T: attention stock verifies: %s", obstacle)
        return False
    layer = next(each for each in runner.model.modules() if isinstance(each, RadixAttention))
    heads = contest.Heads(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
    held = heads, runner.dtype, str(runner.device)
    if held not in _VERDICTS:
        # the backends of the server's own depth, the deepest, come first
        width = runner.server_args.speculative_num_draft_tokens
        won = contest.won(as_stock, extend_attention_fwd, heads, width, runner.dtype, torch.device(runner.device))
        _VERDICTS[held] = bool(ranks.agree_on(int(won)))
    return _VERDICTS[held]


def as_stock(*arguments: Any) -> None:
    """tree_attention with the arguments of SGLang's extend kernel."""
    *tensors, mask, _, mask_indptr, max_nodes, _, _, scale = arguments
    q, k, v, out, k_pool, v_pool, starts, kv_indptr, kv_indices = tensors
    tree_attention(
        *(q, k, v, k_pool, v_pool, starts, kv_indptr, kv_indices),
        *((None, None) if mask is None else (mask, mask_indptr)),
        scale=scale,
        max_nodes=max_nodes,
        out=out,
    )


def refuse_unfit(runner: Any) -> None:
    """Raises ConfigError if the target's attention is not what `tree_attention` computes, as far as its layers say."""
    obstacle = unfit(runner)
    if obstacle is not None:
        raise _refused(obstacle)


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


def _fits(name: str, value: Any) -> bool:
    # a tensor, as sinks are, must not be compared
    plain = name in _PLAIN and (value is _PLAIN[name] or (isinstance(value, int | float) and value == _PLAIN[name]))
    return plain or name in _IGNORED


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"--speculative-c2t-attention tree cannot be had: {reason}; leave it out")
