"""Nodes of draft trees as columns of a table."""

from __future__ import annotations

import torch
from torch import Tensor

ROOT = -1


def best(scores: Tensor, mask: Tensor, count: int) -> Tensor:
    """The `count` True entries of each row with the highest scores, as a mask; of equal ones the lower column.

    scores: (batch, columns) float32. mask: (batch, columns) bool. Returns (batch, columns) bool.
    """
    if count >= mask.shape[1]:
        return mask
    order = scores.masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)[:, :count]
    return mask & torch.zeros_like(mask).scatter_(1, order, True)
