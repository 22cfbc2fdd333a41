"""A fit of Learnt: the most likely slope, weight and offsets, by a damped Newton's method from the fit before.

And whether that one holds: later drafts judge it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from c2t_plugin.planner.contrary import contrary
from c2t_plugin.planner.learnt import Learnt, lost

# Drafts that come between two fits, and that are remembered.
FIT_EVERY, MEMORY = 64, 4096
# Standard errors by which a fit has to predict worse.
DOUBT = 3.0
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


class Evidence(NamedTuple):
    """What a fit is made from. plain, learnt, before: the classifier's own, what is in force, what was before. seen:
    draft tokens. new: drafts since the last fit. owners: whose the newest drafts are, as far as it is known. features:
    (newest, d_max, 2). Of all drafts of the window, the newest last: known, hit: (drafts, d_max) bool, tokens that were
    verified, and accepted; expected: (2, drafts, d_max), by the classifier and by what was learnt when each came."""

    plain: Learnt
    learnt: Learnt
    before: Learnt
    seen: int
    new: int
    owners: Sequence[Hashable]
    features: Tensor
    known: Tensor
    hit: Tensor
    expected: Tensor


class Verdict(NamedTuple):
    """What is in force next, and was before. proven: whether it has foretold the window better than the classifier by
    more than chance. contrary: requests whose newest drafts say the contrary of all others'. discarded: whether a fit
    was thrown away; turned: since the traffic is another."""

    learnt: Learnt
    before: Learnt
    proven: bool
    contrary: set[Hashable]
    discarded: bool = False
    turned: bool = False


def judged(evidence: Evidence) -> Verdict:
    """By drafts that came after each: the fit before by the newest, the classifier by the whole window."""
    plain, learnt, before, seen, new, owners, features, known, hit, expected = evidence
    by_plain, by_used = lost(expected, hit, known)
    known, hit = known[-len(features) :], hit[-len(features) :]
    # of each draft the tokens down to the first that was refused
    reached = known & (torch.arange(known.shape[1]) <= hit.sum(1, keepdim=True))
    strange: set[Hashable] = set()
    # all are believed where nobody knows whose they are
    believed = torch.ones(len(features), dtype=torch.bool)
    if len(owners) == len(features):
        likely = torch.sigmoid(learnt.logits(features))
        strange = contrary(owners, *(each.numpy() for each in (likely, hit, reached)))
        believed = torch.tensor([owner not in strange for owner in owners])
    features, reached, hit = (each[-new:][believed[-new:]] for each in (features, reached, hit))
    now, then, never = (lost(each.logits(features).sigmoid(), hit, reached) for each in (learnt, before, plain))
    learns, proven = learnt is not plain, _worse(by_plain - by_used)
    if learns and _worse(by_used - by_plain):
        # nor does what an earlier server learnt hold here
        return Verdict(plain, plain, proven, strange, discarded=True)
    if _worse(now - then):
        return Verdict(before, before, proven, strange, discarded=True)
    if learns and new >= FIT_EVERY and _worse(now - never):
        # long before the window says so
        return Verdict(plain, plain, proven, strange, discarded=True, turned=True)
    return Verdict(fitted(learnt, forgotten(learnt, new), features, reached, hit, seen), learnt, proven, strange)


def _worse(more: Tensor) -> bool:
    """Whether what was lost more is more than chance."""
    return float(more.mean()) > DOUBT * float(more.std()) / len(more) ** 0.5
