"""The packed Triton backend with `tree_attention` in place of SGLang's extend kernel, where a verify forward is packed.

SGLang's own code still writes keys and values to the pool and makes the metadata and the output. Only the kernel that
it calls last is another, with the same arguments but for the mask: `tree_attention` reads the nodes' own columns alone,
so that in tree mode nobody writes a mask over the prefix, and the buffer of captured graphs has no room for one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from c2t_kernels.attention.kernel import tree_attention
from c2t_plugin.config import TREE_ATTENTION
from c2t_plugin.engines.sglang.verify.triton import PackedTritonAttnBackend
from c2t_plugin.errors import ConfigError

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
    _masked, _asked_for = False, True
    extend_attention_fwd: Any

    def __init__(self, runner: Any, *, masked: bool, asked_for: bool = True, nodes_alone: bool = False) -> None:
        super().__init__(runner, nodes_alone=masked or nodes_alone)
        self._masked, self._asked_for = masked, asked_for
        self._stock_kernel = self.extend_attention_fwd
        self.extend_attention_fwd = torch.compiler.disable(self._attend)

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
            raise refused(f"a layer of the target attends with {', '.join(odd)}")
        else:
            self._stock_kernel(*arguments, **options)


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


def _fits(name: str, value: Any) -> bool:
    # a tensor, as sinks are, must not be compared
    plain = name in _PLAIN and (value is _PLAIN[name] or (isinstance(value, int | float) and value == _PLAIN[name]))
    return plain or name in _IGNORED


def refused(reason: str) -> ConfigError:
    return ConfigError(f"--speculative-c2t-attention tree cannot be had: {reason}; leave it out")
