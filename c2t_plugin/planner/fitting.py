"""A fit of Learnt: the most likely slope, weight and offsets, by a damped Newton's method from the fit before.

And whether that one holds: later drafts judge it. No operation is torch's: with a thread that has a team of OpenMP of
its own, every other thread's arithmetic takes longer, on a CPU by 15%.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from c2t_plugin.planner.arrays import Array, sigmoid
from c2t_plugin.planner.contrary import contrary
from c2t_plugin.planner.learnt import Learnt, lost

# Drafts that come between two fits, and that are remembered.
FIT_EVERY, MEMORY = 64, 4096
# Standard errors by which a fit has to predict worse.
DOUBT = 3.0
# Iterations of Newton's method at most, from the fit before on, and what is gained by one that is the last, in nats.
ITERATIONS, ENOUGH = 8, 1e-3
# Inverse variances, of the slope around 1, of the draft's own weight and an offset around 0: what so many tokens say.
SLOPE_PRIOR, OWN_PRIOR, OFFSET_PRIOR, PRIOR_TOKENS = 4.0, 4.0, 2.0, 10
# Tokens that what an earlier server learnt counts as, at most, beside this one's own.
CARRIED = 512


def prior_of(learnt: Learnt) -> Array:
    """(2 + d_max, 2 + d_max) precision of numbers that this server has seen nothing of yet."""
    prior = np.diag([SLOPE_PRIOR, OWN_PRIOR] + [OFFSET_PRIOR] * len(learnt.offsets))
    return prior * max(1.0, min(learnt.seen, CARRIED) / PRIOR_TOKENS)


def of_this_pair(d_max: int) -> Learnt:
    """What a classifier says that was fitted on this very pair: it counts as what an earlier server has learnt."""
    nothing = Learnt.nothing(d_max)
    return nothing._replace(precision=prior_of(nothing._replace(seen=CARRIED)))


def forgotten(learnt: Learnt, drafts: int) -> Array:
    """How sure it still is when so many more have come."""
    if learnt.precision is None:
        return prior_of(learnt)
    kept = 1.0 - drafts / MEMORY
    return kept * learnt.precision + (1.0 - kept) * prior_of(learnt._replace(seen=0))


def fitted(before: Learnt, sure: Array, features: Array, known: Array, hit: Array, seen: int) -> Learnt:
    """The most likely numbers given these tokens and those before, of which one was so `sure`. features: (drafts,
    d_max, 2). known, hit: (drafts, d_max) bool."""
    each = np.broadcast_to(np.eye(known.shape[1]), (*known.shape, known.shape[1]))
    inputs, accepted = np.concatenate([features, each], -1)[known], hit[known]
    prior = weights = before.weights

    def loss(at: Array) -> float:
        logits = inputs @ at
        return float((np.logaddexp(0.0, logits) - accepted * logits).sum() + 0.5 * (at - prior) @ sure @ (at - prior))

    nats = loss(weights)
    for _ in range(ITERATIONS):
        expected = sigmoid(inputs @ weights)
        gradient = inputs.T @ (accepted - expected) - sure @ (weights - prior)
        curvature = (inputs.T * (expected * (1 - expected))) @ inputs + sure
        step = np.linalg.solve(curvature, gradient)
        # far from the optimum a whole step may lead away from it
        while (after := loss(weights + step)) > nats and np.abs(step).max() > ENOUGH:
            step = step / 2
        if after > nats:
            break
        weights, nats, done = weights + step, after, nats - after < ENOUGH
        if done:
            break
    slope, own = weights[:2].tolist()
    return Learnt(slope, own, torch.from_numpy(weights[2:]), seen, curvature)


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
    features: Array
    known: Array
    hit: Array
    expected: Array


class Verdict(NamedTuple):
    """What is in force next, and was before. contrary: requests whose newest drafts say the contrary of all others'.
    discarded: whether a fit was thrown away; turned: since the traffic is another."""

    learnt: Learnt
    before: Learnt
    contrary: set[Hashable]
    discarded: bool = False
    turned: bool = False


def judged(evidence: Evidence) -> Verdict:
    """By drafts that came after each: the fit before by the newest, the classifier by the whole window."""
    plain, learnt, before, seen, new, owners, features, known, hit, expected = evidence
    by_plain, by_used = lost(expected, hit, known)
    known, hit = known[-len(features) :], hit[-len(features) :]
    # of each draft the tokens down to the first that was refused
    reached = known & (np.arange(known.shape[1]) <= hit.sum(1, keepdims=True))
    strange: set[Hashable] = set()
    # all are believed where nobody knows whose they are
    believed = np.ones(len(features), dtype=bool)
    if len(owners) == len(features):
        strange = contrary(owners, learnt.given(features), hit, reached)
        believed = np.array([owner not in strange for owner in owners])
    features, reached, hit = (each[-new:][believed[-new:]] for each in (features, reached, hit))
    now, then, never = (lost(each.given(features), hit, reached) for each in (learnt, before, plain))
    learns = learnt is not plain
    if learns and _worse(by_used - by_plain):
        # nor does what an earlier server learnt hold here
        return Verdict(plain, plain, strange, discarded=True)
    if _worse(now - then):
        return Verdict(before, before, strange, discarded=True)
    if learns and new >= FIT_EVERY and _worse(now - never):
        # long before the window says so
        return Verdict(plain, plain, strange, discarded=True, turned=True)
    return Verdict(fitted(learnt, forgotten(learnt, new), features, reached, hit, seen), learnt, strange)


def _worse(more: Array) -> bool:
    """Whether what was lost more is more than chance."""
    return len(more) > 1 and float(more.mean()) > DOUBT * float(more.std(ddof=1)) / len(more) ** 0.5
