"""Rows of a strided batch laid end to end for the target's forward pass, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from c2t_kernels.pack.result import Packed


def pack_ragged(
    kept: Tensor, sources: Sequence[Tensor], *, capacity: int, pads: Sequence[float], slots: int | None = None
) -> Packed:
    """c2t_kernels.pack_ragged, which says what it computes, in float32 torch."""
    bs, width = sources[0].shape[:2]
    lengths = kept.clamp(-1, width - 1) + 1
    if slots is not None:
        lengths = torch.cat([lengths, lengths.new_zeros(slots - bs)])
        room = width - lengths
        spare = capacity - lengths.sum() - (room.cumsum(0) - room)
        lengths = lengths + spare.clamp(min=0).minimum(room)
    ends = lengths.cumsum(0).clamp(max=capacity)
    cu_seqlens = torch.cat([ends.new_zeros(1), ends]).int()
    own = torch.arange(width, device=kept.device) < lengths[:bs, None]
    values = []
    for source, pad in zip(sources, pads, strict=True):
        packed = source.new_full((capacity, *source.shape[2:]), pad)
        rows = source[own][:capacity]
        packed[: len(rows)] = rows
        values.append(packed)
    return Packed(tuple(values), cu_seqlens, cu_seqlens.diff())


def scatter_ragged(packed: Tensor, cu_seqlens: Tensor, width: int, *, fill: float) -> Tensor:
    """c2t_kernels.scatter_ragged, which says what it computes, in float32 torch."""
    lengths = cu_seqlens.diff()
    own = torch.arange(width, device=packed.device) < lengths[:, None]
    strided = packed.new_full((len(lengths), width, *packed.shape[1:]), fill)
    strided[own] = packed[: int(cu_seqlens[-1])]
    return strided
