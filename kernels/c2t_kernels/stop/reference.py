"""Where each chain of a batch ends: by confidence, by a budget of tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from c2t_kernels.checks import check_fraction


def early_stop(
    confidence: Tensor,
    beta: Tensor | float,
    max_depth: Tensor | int,
    *,
    budget: Tensor | int | None = None,
    unclipped: Tensor | None = None,
    unknown: Tensor | None = None,
    links: Tensor | None = None,
) -> Tensor:
    """c2t_kernels.early_stop, which says what it computes, in float32 torch."""
    if not isinstance(beta, Tensor):
        check_fraction("early_stop: beta", beta)
    bs, d_max = confidence.shape
    device = confidence.device
    beta, max_depth = (torch.as_tensor(value, device=device).reshape(-1, 1) for value in (beta, max_depth))
    depth = torch.arange(d_max, device=device)
    allowed = (depth < max_depth).expand(bs, d_max)
    kept = allowed & (~(confidence < beta)).int().cumprod(dim=1).bool()
    if unclipped is not None:
        unclipped.copy_(kept.sum(dim=1))
    if unknown is not None:
        unknown += confidence.isnan().sum()
    if budget is not None:
        key = confidence.nan_to_num(nan=math.inf, posinf=math.inf).cummin(dim=1).values
        kept = _best(key, kept, int(budget))
    lengths = kept.sum(dim=1)
    if links is not None:
        links.scatter_(1, lengths[:, None], -1)
    return lengths.int()


def _best(key: Tensor, candidate: Tensor, wanted: int) -> Tensor:
    """The `wanted` candidates of largest key, shallower and then lower rows first among equals."""
    # depth-major, so that a stable sort leaves equals in that order
    order = key.T.flatten().masked_fill(~candidate.T.flatten(), -math.inf).sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(candidate.T.flatten())
    chosen[order[: max(wanted, 0)]] = True
    return chosen.view(candidate.T.shape).T & candidate
