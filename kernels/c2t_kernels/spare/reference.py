"""Rows that a pass of the target has left: the next-best nodes of its trees."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fill_spare_rows(keep: Tensor, key: Tensor, most: int, sizes: Tensor, own: Tensor | None = None) -> Tensor:
    """c2t_kernels.fill_spare_rows, which says what it computes, in float32 torch."""
    free = ~keep & (key > 0)
    if own is not None:
        free &= ~own[:, None]
    # of each tree as many as it may still have, then of all as many as the pass has room for
    free = _best(free, key, most - keep.sum(1, keepdim=True))
    rows = keep.sum() + len(keep)
    size = torch.cat([sizes, rows[None]]).take(torch.searchsorted(sizes, rows))
    return keep | _best(free.view(1, -1), key.reshape(1, -1), (size - rows).view(1, 1)).view(keep.shape)


def _best(candidate: Tensor, key: Tensor, wanted: Tensor) -> Tensor:
    """The `wanted` candidates of largest key of each row, of equals the first; (rows, n), (rows, 1)."""
    order = key.masked_fill(~candidate, -math.inf).sort(dim=1, descending=True, stable=True).indices
    places = torch.arange(order.shape[1], device=key.device)
    return candidate & torch.zeros_like(candidate).scatter(1, order, places < wanted)
