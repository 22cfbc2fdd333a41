"""The CPU engine's attention backend for verify forwards whose requests have different lengths (see ragged.py)."""

from __future__ import annotations

from typing import Any

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
