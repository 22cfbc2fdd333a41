"""Nodes of a whole batch of trees that a pass of the target has room for."""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_kernels.clip.result import ClippedTrees


def clip_trees(keep: Tensor, key: Tensor, most: int, room: int) -> ClippedTrees:
    """c2t_kernels.clip_trees, which says what it computes, in float32 torch."""
    counted = key.where(keep & (key > 0), 0.0)
    order = counted.flatten().argsort(descending=True, stable=True)[:room]
    clipped = torch.zeros_like(keep).flatten().index_fill_(0, order, True).view_as(keep)
    surest = counted.sort(dim=1, descending=True).values[:, :most]
    return ClippedTrees(clipped & (counted > 0), keep.sum(1, dtype=torch.int32), surest)
