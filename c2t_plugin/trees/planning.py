"""One budget of the target's rows for the nodes of all trees: what a planner says, or what costs nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from c2t_plugin.trees.nodes import best


def plan(keep: Tensor, key: Tensor, most: int, decide: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The nodes to verify, (bs, columns) bool: of each tree its surest ones, as many as `decide` says.

    keep: (bs, columns) bool, closed under ancestors, at most `most` per row. key: (bs, columns) float32, the lowest
    confidence on the way from the root, so that a tree's nodes by falling key are like a chain: to verify one is to
    have verified those before it. Of equal ones the one drafted first goes first, and so no node before one above it.
    decide: from the sizes of the trees, (bs,) int32, and their keys in that order, (bs, most) float32 with no meaning
    past the size, to how many nodes of each are verified, (bs,) int.
    """
    order = key.masked_fill(~keep, -torch.inf).argsort(dim=1, descending=True, stable=True)[:, :most]
    counts = decide(keep.sum(1, dtype=torch.int32), key.gather(1, order))
    places = torch.arange(order.shape[1], device=keep.device)
    return keep & torch.zeros_like(keep).scatter_(1, order, places < counts[:, None])


def fill(keep: Tensor, key: Tensor, most: int, sizes: Tensor, own: Tensor) -> Tensor:
    """keep, and the next-best nodes that make the pass no larger, the surest of all trees first: (bs, columns) bool.
    Nothing waits for the device.

    keep, most: see `plan`. key: the same of all that was drafted, not above 0 of what is no node; the parent of a node
    that is not kept is kept, unless its tree is as large as may be. sizes: (n,) int64 rows of captured graphs, rising:
    a pass has those of the next one. own: (bs,) bool, trees with a threshold of their own, which get nothing.
    """
    # what was not kept may be surer: of a layer only so many are
    kept_first = key.masked_fill(keep, torch.inf)
    free = best(kept_first, keep | ((key > 0) & ~own[:, None]), most) & ~keep
    needed = keep.sum() + len(keep)
    spare = sizes.take(torch.searchsorted(sizes, needed).clamp(max=len(sizes) - 1)) - needed
    order = key.masked_fill(~free, -torch.inf).flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return keep | (free & (rank.view_as(keep) < spare))
