"""Which nodes a rule keeps, and how many of them are accepted, swept over its settings on recorded trees and chains.

A rule that scores nodes and keeps those at or above a threshold is swept in one pass: a node is kept with all of its
ancestors or not at all, so it is kept exactly where the smallest score on its path is at or above the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from c2t_plugin.errors import C2TError
from c2t_plugin.traces.forest import Forest, node_count
from c2t_plugin.trees.nodes import best

POINTS = 200


@dataclass(frozen=True)
class Sweep:
    """One rule at every setting and state.

    settings: (settings,) float32 thresholds, or sizes. gamma: (settings, states) int16 draft tokens it would verify.
    tau: (settings, states) int16 of them that would be accepted, bonus token excluded.
    """

    settings: Tensor
    gamma: Tensor
    tau: Tensor


def thresholds(scores: Tensor, points: int = POINTS) -> Tensor:
    """At most `points` thresholds, ascending and distinct, at quantiles of scores (any shape); the last is above all.

    Half of them are quantiles of the upper tenth, because of a tree's nodes few are worth keeping.
    """
    ordered = scores.flatten().float()
    ordered = ordered[ordered.isfinite()].sort().values
    if not len(ordered):
        raise C2TError("no finite score to set thresholds by")
    shares = torch.cat([torch.linspace(0, 0.9, points // 2), 1 - torch.logspace(-1, -5, points - points // 2 - 1)])
    levels = ordered[(shares.double() * (len(ordered) - 1)).long()].unique()
    return torch.cat([levels, torch.tensor([torch.inf])])


def path_minimum(forest: Forest, scores: Tensor) -> Tensor:
    """The smallest score from below the root down to each node, itself included: (trees, nodes) -> the same.

    A score that is NaN keeps its node, as a server does, and so counts as infinity.
    """
    lowest = torch.where(scores.isnan(), torch.inf, scores.float())
    k, start = forest.k, forest.k
    while start < lowest.shape[1]:
        stop = min(start + k * k, lowest.shape[1])
        parents = forest.parent_ids[:, start // k : stop // k].long()
        above = lowest.gather(1, parents).repeat_interleave(k, dim=1)
        lowest[:, start:stop] = torch.minimum(lowest[:, start:stop], above)
        start = stop
    return lowest


def truncate(forest: Forest, layers: int) -> Forest:
    """The same trees without the nodes below depth `layers`. C2TError if they are not as deep."""
    if not 1 <= layers <= forest.layers:
        raise C2TError(f"depth must be between 1 and the recorded {forest.layers}, got {layers}; collect deeper trees")
    nodes, k = node_count(forest.k, layers), forest.k
    parts = {name: getattr(forest, name)[:, :nodes] for name in ("joint_log_prob", "log_prob", "token_ids", "accepted")}
    parts |= {name: getattr(forest, name)[:, : nodes // k] for name in ("entropy", "margin", "parent_ids")}
    return Forest(k, layers, **parts)


def threshold_sweep(forest: Forest, scores: Tensor, levels: Tensor | None = None, keeps_failing: bool = False) -> Sweep:
    """Keep a node if it and all of its ancestors score at least the threshold; trees and chains alike.

    scores: (trees, nodes). levels: ascending thresholds, quantiles of the path minima if None.
    keeps_failing: of chains only, the token that failed is verified too.
    """
    lowest = path_minimum(forest, scores)
    if levels is None:
        levels = thresholds(lowest)
    # a node is kept at the first `passed` levels
    passed = torch.bucketize(lowest, levels, right=True)
    gamma = _kept(passed, len(levels))
    tau = _kept(torch.where(forest.accepted, passed, 0), len(levels))
    if keeps_failing:
        if forest.k != 1:
            raise C2TError("the failing token can be kept in chains only")
        gamma = (gamma + 1).clamp_max(forest.layers)
        tau = torch.minimum(gamma, forest.accepted.sum(1))
    return Sweep(levels, gamma.short(), tau.short())


def _kept(passed: Tensor, levels: int) -> Tensor:
    """How many of a row's nodes are kept at each level: (rows, nodes) levels that each passes -> (levels, rows)."""
    rows = torch.arange(len(passed))[:, None] * (levels + 1)
    counts = torch.bincount((passed + rows).flatten(), minlength=len(passed) * (levels + 1)).view(len(passed), -1)
    # passed more than `level` levels
    return counts.flip(1).cumsum(1).flip(1)[:, 1:].T


def static_sweep(chain: Forest) -> Sweep:
    """Chains of every length from 1 to the recorded one."""
    lengths = torch.arange(1, chain.layers + 1)
    gamma = lengths[:, None].expand(-1, len(chain))
    return Sweep(lengths.float(), gamma.short(), torch.minimum(gamma, chain.accepted.sum(1)).short())


def eagle2_sweep(forest: Forest) -> Sweep:
    """EAGLE-2: of the whole tree the N nodes of highest joint probability, for every N; equal ones in node order."""
    order = forest.joint_log_prob.argsort(dim=1, descending=True, stable=True)
    hits = forest.accepted.gather(1, order).short().cumsum(1)
    sizes = torch.arange(1, hits.shape[1] + 1)
    return Sweep(sizes.float(), sizes[:, None].expand(-1, len(forest)).short(), hits.T.short())


def kept_nodes(forest: Forest, confidence: Tensor, beta: float, top_k: int | None = None) -> Tensor:
    """C2T's tree at one beta (C2T 4.2, algorithm 1): (trees, nodes) bool.

    A node is kept if its confidence is at least beta (or NaN, which counts as infinity), its parent is kept and, with
    top_k, it is among the top_k most confident of these in its layer (second top-K: line 21 and 4.2.2 put only those
    into the tree). Of equal ones the lower column of the tree that C2T itself grows is kept, which lists children in
    the order of their parents; the record lists them by the probability of their parents. Below nodes that the record
    did not expand nothing is known, so they stay leaves: see censored().
    """
    passes = ~(confidence < beta)
    ranked = confidence.nan_to_num(nan=torch.inf)
    kept = torch.zeros_like(passes)
    k, start, stop, above = forest.k, 0, forest.k, 0
    place = torch.arange(k).expand(len(forest), -1)
    while start < passes.shape[1]:
        layer = passes[:, start:stop]
        if start:
            parents = forest.parent_ids[:, start // k : stop // k].long()
            layer = layer & kept.gather(1, parents).repeat_interleave(k, dim=1)
            place = _grown_order(place.gather(1, parents - above), k)
        if top_k is not None:
            column = place.argsort(dim=1)
            chosen = best(ranked[:, start:stop].gather(1, column), layer.gather(1, column), top_k)
            layer = chosen.gather(1, place)
        kept[:, start:stop] = layer
        start, stop, above = stop, min(stop + k * k, passes.shape[1]), start
    return kept


def _grown_order(parents: Tensor, k: int) -> Tensor:
    """Places of a layer's nodes when they stand in the order of their parents, then by rank, 0 the first.

    parents: (trees, distributions) int64 places of the parents. Returns (trees, distributions * k) int64.
    """
    earlier = parents.argsort(dim=1).argsort(dim=1)
    return (earlier[..., None] * k + torch.arange(k)).flatten(1)


def top_k_sweep(forest: Forest, confidence: Tensor, betas: Sequence[float], top_k: int | None) -> Sweep:
    """C2T's trees with the second top-K at each of these betas; slower than threshold_sweep, one pass each."""
    kept = [kept_nodes(forest, confidence, beta, top_k) for beta in betas]
    gamma = torch.stack([each.sum(1) for each in kept])
    tau = torch.stack([(each & forest.accepted).sum(1) for each in kept])
    return Sweep(torch.tensor(betas), gamma.short(), tau.short())


@dataclass(frozen=True)
class Censored:
    """Where the record ends before a rule's tree does.

    nodes: share of the kept nodes above the last layer that the record did not expand.
    states: share of the states whose last kept and accepted node is one of these: they might be accepted for longer.
    """

    nodes: float
    states: float


def censored(forest: Forest, kept: Tensor) -> Censored:
    """How often a kept node was not expanded in the record. kept: (trees, nodes) bool, ancestor-closed."""
    expanded = torch.zeros(kept.shape[0], kept.shape[1] + 1, dtype=torch.bool)
    # column 0 takes the root's -1
    expanded.scatter_(1, forest.parent_ids.long() + 1, True)
    blind = kept & ~expanded[:, 1:] & (forest.depth < forest.layers)
    inner = kept & (forest.depth < forest.layers)
    hit = kept & forest.accepted
    last = hit & (forest.depth == hit.sum(1, keepdim=True))
    nodes = float(blind.sum() / inner.sum().clamp_min(1))
    return Censored(nodes=nodes, states=float((last & blind).any(1).float().mean()))
