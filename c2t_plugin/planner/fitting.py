"""A fit of Learnt: the most likely slope, weight and offsets, by a damped Newton's method from the fit before."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from c2t_plugin.planner.learnt import Learnt

# Drafts that are remembered.
MEMORY = 4096
# Iterations of Newton's method at most, and what is gained by one that is the last, in nats: the fit before is where
# they start.
ITERATIONS, ENOUGH = 8, 1e-3
# Inverse variances: of the slope around 1, of the draft's own logit's around 0, of an offset around 0; as much as so
# many tokens say.
SLOPE_PRIOR, OWN_PRIOR, OFFSET_PRIOR, PRIOR_TOKENS = 4.0, 4.0, 2.0, 10
# Tokens that what an earlier server learnt counts as, at most, beside this one's own.
CARRIED = 512


def prior_of(learnt: Learnt) -> Tensor:
    """(2 + d_max, 2 + d_max) precision of numbers that this server has seen nothing of yet."""
    depths = len(learnt.offsets)
    prior = torch.tensor([SLOPE_PRIOR, OWN_PRIOR] + [OFFSET_PRIOR] * depths, dtype=torch.float64).diag()
    return prior * max(1.0, min(learnt.seen, CARRIED) / PRIOR_TOKENS)


def forgotten(learnt: Learnt, drafts: int) -> Tensor:
    """How sure it still is when so many more have come."""
    if learnt.precision is None:
        return prior_of(learnt)
    kept = 1.0 - drafts / MEMORY
    return kept * learnt.precision + (1.0 - kept) * prior_of(learnt._replace(seen=0))


def fitted(before: Learnt, sure: Tensor, features: Tensor, known: Tensor, hit: Tensor, seen: int) -> Learnt:
    """The most likely numbers given these tokens and those before, of which one was so `sure`. features: (drafts,
    d_max, 2). known, hit: (drafts, d_max) bool."""
    each = torch.eye(known.shape[1], dtype=torch.float64).expand(len(features), -1, -1)
    inputs, accepted = torch.cat([features, each], -1)[known], hit[known].double()
    prior = weights = before.weights

    def loss(at: Tensor) -> float:
        return float(cross_entropy(inputs @ at, accepted, reduction="sum") + 0.5 * (at - prior) @ sure @ (at - prior))

    lost = loss(weights)
    for _ in range(ITERATIONS):
        expected = torch.sigmoid(inputs @ weights)
        gradient = inputs.T @ (accepted - expected) - sure @ (weights - prior)
        curvature = (inputs.T * (expected * (1 - expected))) @ inputs + sure
        step = torch.linalg.solve(curvature, gradient)
        # far from the optimum a whole step may lead away from it
        while (after := loss(weights + step)) > lost and float(step.abs().max()) > ENOUGH:
            step = step / 2
        if after > lost:
            break
        weights, lost, done = weights + step, after, lost - after < ENOUGH
        if done:
            break
    slope, own = weights[:2].tolist()
    return Learnt(slope, own, weights[2:], seen, curvature)
