"""Where each chain of a batch ends: by confidence, by a budget of tokens, by the size of a captured graph."""

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
    tiers: Tensor | None = None,
    next_token: Tensor | None = None,
) -> Tensor:
    """How many draft tokens of each chain the target verifies (C2T 5.5).

    confidence: (bs, d_max) float32 in [0, 1], confidence[:, i] of the token at depth i + 1; NaN where it is not known.
    beta: one number, or (bs,) float32: below it a token is dropped; equality keeps, and so does NaN.
    max_depth: one int, or (bs,) int32, longest chain of each request; 0 for a request that verifies its root alone.
    budget: draft tokens of the whole batch, roots not counted. The tokens of lowest confidence are dropped.
    tiers: (n,) int32 ascending, totals of draft tokens that cost the same as anything between them and the tier before.
        Chains are extended past beta, most confident token first, until the total is the next tier (or the budget or
        every max_depth is reached). Not the paper's rule: it spends rows that would be padding.
    next_token: (bs, width) int, width > d_max, links of the engine's chain, node i -> i + 1 with node 0 the root. The
        links of the last kept node and of all after it become -1, in place.
    Returns (bs,) int32 in [0, max_depth].

    Raises ValueError or TypeError for a Python number beta that is not in [0, 1].

    Tokens are ordered by the smallest confidence on the way to them, so that a token never goes before one that it
    needs; of equals the shallower is better, then the one of the lower row. An unknown confidence counts as infinite.
    """
    if not isinstance(beta, Tensor):
        check_fraction("early_stop: beta", beta)
    bs, d_max = confidence.shape
    device = confidence.device
    beta, max_depth = (torch.as_tensor(value, device=device).reshape(-1, 1) for value in (beta, max_depth))
    depth = torch.arange(d_max, device=device)
    allowed = (depth < max_depth).expand(bs, d_max)
    kept = allowed & (~(confidence < beta)).int().cumprod(dim=1).bool()
    if budget is not None or tiers is not None:
        key = confidence.nan_to_num(nan=math.inf, posinf=math.inf).cummin(dim=1).values
        room = bs * d_max if budget is None else int(budget)
        kept = _best(key, kept, room)
        if tiers is not None:
            total = int(kept.sum())
            target = min([tier for tier in tiers.tolist() if tier >= total], default=total)
            kept = kept | _best(key, allowed & ~kept, min(target, room) - total)
    lengths = kept.sum(dim=1).int()
    if next_token is not None:
        node = torch.arange(next_token.shape[1], device=next_token.device)
        next_token.masked_fill_(node >= lengths[:, None], -1)
    return lengths


def _best(key: Tensor, candidate: Tensor, wanted: int) -> Tensor:
    """The `wanted` candidates of largest key, shallower and then lower rows first among equals."""
    # depth-major, so that a stable sort leaves equals in that order
    order = key.T.flatten().masked_fill(~candidate.T.flatten(), -math.inf).sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(candidate.T.flatten())
    chosen[order[: max(wanted, 0)]] = True
    return chosen.view(candidate.T.shape).T & candidate
