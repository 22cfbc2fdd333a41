"""Rows of a strided batch laid end to end for the target's forward pass, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from c2t_kernels.pack.result import Packed

__all__ = ["Packed", "pack_ragged", "scatter_ragged"]


def pack_ragged(
    kept: Tensor, sources: Sequence[Tensor], *, capacity: int, pads: Sequence[float], slots: int | None = None
) -> Packed:
    """Lay each request's root and kept draft tokens end to end.

    kept: (bs,) int32, draft tokens of each request, root not counted, up to width - 1; -1 is a request without rows.
    sources: (bs, width) each, or (bs, width, hidden), any dtype; row [i, 0] is the root's.
    capacity: rows of the result, fixed by the caller. Rows that do not fit are dropped, from the last request back.
    pads: one value per source for the rows that nothing fills.
    slots: places for requests, at least bs. With it spare rows go to each request's next places, from the first request
        on, then to slots without a request, nobody above the width; cu_seqlens then has an entry for every slot.

    On a GPU: one launch per three sources (bs, width), and one per wider source.
    """
    if kept.is_cuda:
        from c2t_kernels.pack import kernel

        return kernel.pack_ragged(kept, sources, capacity=capacity, pads=pads, slots=slots)
    from c2t_kernels.pack import reference

    return reference.pack_ragged(kept, sources, capacity=capacity, pads=pads, slots=slots)


def scatter_ragged(packed: Tensor, cu_seqlens: Tensor, width: int, *, fill: float) -> Tensor:
    """Inverse of pack_ragged for one tensor: the rows of each request at its place in a strided batch.

    packed: (capacity,) or (capacity, hidden). cu_seqlens: (bs + 1,) int32, as pack_ragged gives it.
    Returns (bs, width) or (bs, width, hidden); places that no packed row belongs to hold `fill`.

    On a GPU: one launch.
    """
    if packed.is_cuda:
        from c2t_kernels.pack import kernel

        return kernel.scatter_ragged(packed, cu_seqlens, width, fill=fill)
    from c2t_kernels.pack import reference

    return reference.scatter_ragged(packed, cu_seqlens, width, fill=fill)
