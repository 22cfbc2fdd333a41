"""One layer of a C2T tree: score the frontier's children, prune them, choose the next frontier (C2T algorithm 1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from c2t_kernels.checks import check_fraction
from c2t_kernels.network import PathSums, ScoringNetwork, children, confidence_of, finite
from c2t_kernels.stats import DraftStats


class GrownLayer(NamedTuple):
    """Children of a frontier of `slots` nodes, k each, and the next frontier of `width` places, best child first.

    confidence: (bs, slots * k) float32, of child rank j of slot i in column i * k + j; NaN where the statistics are not
        finite, the token is impossible or the slot is dead.
    kept: (bs, slots * k) bool, children that belong to the tree. `kept & confidence.isnan()` are those kept unscored.
    children: (bs, width) int32, column of each frontier node above; -1 in a dead place.
    parents: (bs, width) int32, slot of its parent; -1 in a dead place.
    token_ids: (bs, width) int64; 0 in a dead place.
    joint_log_prob: (bs, width) float32; -inf in a dead place.
    path_entropy: (bs, width) float32, as grow_layer takes it; 0 in a dead place.
    alive: (bs, width) bool, False in a dead place.
    """

    confidence: Tensor
    kept: Tensor
    children: Tensor
    parents: Tensor
    token_ids: Tensor
    joint_log_prob: Tensor
    path_entropy: Tensor
    alive: Tensor


def grow_layer(
    network: ScoringNetwork,
    joint_log_prob: Tensor,
    path_entropy: Tensor,
    alive: Tensor,
    stats: DraftStats,
    beta: Tensor | float,
    depth: int,
    *,
    width: int,
) -> GrownLayer:
    """c2t_kernels.grow_layer, which says what it computes, in float32 torch."""
    if not isinstance(beta, Tensor):
        check_fraction("grow_layer: beta", beta)
    stats = DraftStats(*(value.unflatten(0, joint_log_prob.shape) for value in stats))
    known, possible = finite(stats), (alive[..., None] & (stats.log_probs != -math.inf)).flatten(1)
    node = children(PathSums(joint_log_prob, path_entropy), stats, depth, known=known)
    confidence = confidence_of(network, node).flatten(1)
    confidence = torch.where(possible & known.flatten(1), confidence, torch.nan)
    kept, chosen = select_children(confidence, possible, beta, width)
    live, column = chosen >= 0, chosen.clamp_min(0).long()
    return GrownLayer(
        confidence=confidence,
        kept=kept,
        children=chosen,
        parents=torch.where(live, chosen // stats.log_probs.shape[2], -1),
        token_ids=torch.where(live, stats.token_ids.flatten(1).gather(1, column), 0).long(),
        joint_log_prob=torch.where(live, node.joint_log_prob.flatten(1).gather(1, column), -math.inf),
        path_entropy=torch.where(live, node.path_entropy.flatten(1).gather(1, column), 0.0),
        alive=live,
    )


def select_children(
    confidence: Tensor, possible: Tensor, beta: Tensor | float, width: int, *, prune: bool = True, select: bool = True
) -> tuple[Tensor, Tensor]:
    """The pruning of grow_layer alone: (bs, n) float32 and bool -> kept (bs, n) bool, children (bs, width) int32."""
    passing = possible
    if prune:
        passing = possible & ~(confidence < torch.as_tensor(beta, device=confidence.device).reshape(-1, 1))
    key = confidence.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(~passing, -math.inf)
    order = key.sort(dim=1, descending=True, stable=True).indices[:, :width]
    children = torch.where(passing.gather(1, order), order, -1)
    missing = max(width - children.shape[1], 0)
    children = torch.nn.functional.pad(children, (0, missing), value=-1).int()
    kept = torch.zeros_like(passing).scatter(1, order, True) & passing if select else passing
    return kept, children
