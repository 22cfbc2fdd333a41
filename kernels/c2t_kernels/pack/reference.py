"""Rows of a strided batch laid end to end for the target's forward pass, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Rows of all requests end to end.

    values: one per source, (capacity,) or (capacity, hidden) of the source's dtype; rows past the last request hold
        that source's pad value.
    cu_seqlens: (bs + 1,) int32, or (slots + 1,); request i owns rows cu_seqlens[i] to cu_seqlens[i + 1]. At most the
        capacity.
    lengths: (bs,) int32, or (slots,); how many rows each has.
    """

    values: tuple[Tensor, ...]
    cu_seqlens: Tensor
    lengths: Tensor


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
