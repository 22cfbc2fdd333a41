"""The CPU engine's attention backend for verify forwards whose requests have different lengths (see ragged.py), and for
batches that are padded to the largest one of several ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
from torch import Tensor


class RaggedCpuAttnBackend(IntelAMXAttnBackend):
    """SGLang's CPU backend, which passes lengths per request to its kernel but fills in one for all."""

    supports_ragged_verify_graph = True
    c2t_packing = "cpu"

    def _build_extend_metadata(self, forward_batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        uniform: tuple[Tensor, Tensor, Tensor, Tensor | None] = super()._build_extend_metadata(forward_batch)
        layout = forward_batch.spec_info.ragged_verify_layout if forward_batch.forward_mode.is_target_verify() else None
        if layout is None:
            return uniform
        lengths, mask = layout.verify_lens, uniform[3]
        if mask is not None:
            mask = mask[: int((lengths.long() ** 2).sum())]
        return forward_batch.seq_lens + lengths, lengths, layout.extend_start_loc, mask


_forward_extend, _forward_decode = IntelAMXAttnBackend.forward_extend, IntelAMXAttnBackend.forward_decode


def _extend(self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
    requests = len(self.extend_metadata[0])
    if len(forward_batch.req_pool_indices) > requests:
        forward_batch = copy.copy(forward_batch)
        forward_batch.req_pool_indices = forward_batch.req_pool_indices[:requests]
    return _forward_extend(self, q, k, v, layer, forward_batch, *rest, **named)


def _decode(self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
    known = self.draft_decode_metadata
    rows = len(forward_batch.seq_lens if known is None else known[1])
    if len(q) <= rows:
        return _forward_decode(self, q, k, v, layer, forward_batch, *rest, **named)
    shorter = copy.copy(forward_batch)
    shorter.out_cache_loc = forward_batch.out_cache_loc[:rows]
    found = _forward_decode(self, q[:rows], k[:rows], v[:rows], layer, shorter, *rest, **named)
    return torch.cat([found, found.new_zeros(len(q) - rows, found.shape[1])])


def take_padded_batches() -> None:
    """Under DP attention SGLang pads a draft's batch when its metadata is made already. Its kernels on a GPU take that;
    those of the CPU have never seen it. Rows behind the metadata's are nobody's."""
    IntelAMXAttnBackend.forward_extend, IntelAMXAttnBackend.forward_decode = _extend, _decode
