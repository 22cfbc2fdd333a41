"""One budget of the target's rows for the nodes of all trees: what a planner says, or what costs nothing."""

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


def clip(keep: Tensor, key: Tensor, most: int, room: int) -> tuple[Tensor, Tensor]:
    """The surest `room` nodes of all trees together, (bs, columns) bool; and of each tree the keys of its nodes,
    falling, 0 behind the last: (bs, most) float32. Nothing waits for the device.

    keep, key, most: see `plan`; a node's key is above 0, or it counts for nothing. Of equal ones those of the first
    trees go first, and of one tree those drafted first.
    """
    surest, columns = key.masked_fill(~keep, 0.0).sort(dim=1, descending=True, stable=True)
    surest, columns = surest[:, :most], columns[:, :most]
    return torch.zeros_like(keep).scatter_(1, columns, _largest(surest, room)), surest


def _largest(keys: Tensor, room: int | Tensor) -> Tensor:
    """Which are the `room` largest of all (bs, places) that are above 0; of equal ones those of the first rows are, and
    of one row the first."""
    order = keys.flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (rank.view_as(keys) < room) & (keys > 0)


def fill(keep: Tensor, key: Tensor, most: int, sizes: Tensor, own: Tensor | None) -> Tensor:
    """keep, and the next-best nodes that make the pass no larger, the surest of all trees first: (bs, columns) bool.
    Nothing waits for the device.

    keep, most: see `plan`. key: the same of all that was drafted, not above 0 of what is no node; the parent of a node
    that is not kept is kept, unless its tree is as large as may be. sizes: (n + 1,) int64 rows of captured graphs,
    rising, and 0 behind them: a pass has those of the next one. own: (bs,) bool, trees with a threshold of their own,
    which get nothing; None: there are none.
    """
    # what was not kept may be surer: of a layer only so many are
    kept_first = key.clamp_max(1.0)
    if own is not None:
        kept_first.masked_fill_(own[:, None], 0.0)
    sorted_keys, columns = kept_first.masked_fill_(keep, torch.inf).sort(dim=1, descending=True, stable=True)
    surest, columns = sorted_keys[:, :most], columns[:, :most]
    # nodes that the pass has room for; past the largest graph for none that is not kept
    nodes = sizes - len(keep)
    room = nodes.take(torch.searchsorted(nodes[:-1], keep.sum()))
    return keep | torch.zeros_like(keep).scatter_(1, columns, _largest(surest, room))
