"""One budget of the target's rows for the nodes of all trees, as a planner says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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
