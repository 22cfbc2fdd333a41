"""Rows that a pass of the target has left: the next-best nodes of its trees."""

from __future__ import annotations

from torch import Tensor

__all__ = ["fill_spare_rows"]


def fill_spare_rows(keep: Tensor, key: Tensor, most: int, sizes: Tensor, own: Tensor | None = None) -> Tensor:
    """keep, and the next-best nodes that make the pass no larger, the surest of all trees first: (bs, columns) bool.

    keep: (bs, columns) bool, verified anyway: closed under ancestors, at most `most` per row, roots not counted.
    key: (bs, columns) float32, the lowest confidence on the way from the root; not above 0 of what is no node. The
        parent of a node that is not kept is kept, unless its tree is as large as may be.
    sizes: (n,) int64, rows that a pass can have, rising; roots count. Beyond the last one nothing is filled.
    own: (bs,) bool, trees that get nothing.

    Of equal keys those of the first rows are better, and of one row the first. Nothing waits for the device.

    On a GPU: one launch of one program, for more than 8,192 places some twenty.
    """
    if keep.is_cuda:
        from c2t_kernels.spare import kernel

        return kernel.fill_spare_rows(keep, key, most, sizes, own)
    from c2t_kernels.spare import reference

    return reference.fill_spare_rows(keep, key, most, sizes, own)
