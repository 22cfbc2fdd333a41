"""Nodes of a whole batch of trees that a pass of the target has room for."""

from __future__ import annotations

from torch import Tensor

from c2t_kernels.clip.result import ClippedTrees as ClippedTrees

__all__ = ["ClippedTrees", "clip_trees"]


def clip_trees(keep: Tensor, key: Tensor, most: int, room: int) -> ClippedTrees:
    """The surest `room` nodes of all trees together.

    keep: (bs, columns) bool, closed under ancestors.
    key: (bs, columns) float32, the lowest confidence on the way from the root. What is not above 0 is never verified.
    most: nodes that a tree has at most.
    room: nodes that are verified at most, roots not counted.

    Of equal keys those of the first rows are better, and of one row the first. Nothing waits for the device.

    On a GPU: one launch of a program per tree; for more than 8,192 places some fifteen.
    """
    if keep.is_cuda:
        from c2t_kernels.clip import kernel

        return kernel.clip_trees(keep, key, most, room)
    from c2t_kernels.clip import reference

    return reference.clip_trees(keep, key, most, room)
