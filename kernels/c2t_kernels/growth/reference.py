"""One layer of a C2T tree: score the frontier's children, prune them, choose the next frontier (C2T algorithm 1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from c2t_kernels.checks import check_fraction
from c2t_kernels.network.reference import ScoringNetwork, confidence_of
from c2t_kernels.stats.reference import DraftStats


class GrownLayer(NamedTuple):
    """Children of a frontier of `slots` nodes, k each, and the next frontier of `width` places, best child first.

    confidence: (bs, slots * k) float32, of child rank j of slot i in column i * k + j; NaN where the statistics are not
        finite, the word is impossible or the slot is dead.
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
    prune: bool = True,
    select: bool = True,
) -> GrownLayer:
    """c2t_kernels.grow_layer, which says what it computes, in float32 torch."""
    if not isinstance(beta, Tensor):
        check_fraction("grow_layer: beta", beta)
    bs, slots = joint_log_prob.shape
    shape = (bs, slots, stats.log_probs.shape[1])
    log_prob, token_ids = stats.log_probs.reshape(shape), stats.token_ids.reshape(shape)
    entropy, margin = (x.reshape(bs, slots, 1).expand(shape) for x in (stats.entropy, stats.margin))
    finite = torch.isfinite(log_prob) & torch.isfinite(entropy)
    possible = (alive[..., None] & (log_prob != -math.inf)).flatten(1)
    joint = joint_log_prob[..., None] + torch.where(finite, log_prob, 0.0)
    path = path_entropy[..., None] + torch.where(finite, entropy, 0.0)
    confidence = confidence_of(
        network,
        joint_log_prob=joint,
        log_prob=log_prob,
        entropy=entropy,
        margin=margin,
        path_entropy=path,
        rank=torch.arange(shape[2], device=joint.device).float().expand(shape),
        depth=depth,
    ).flatten(1)
    confidence = torch.where(possible & finite.flatten(1), confidence, torch.nan)
    kept, children = select_children(confidence, possible, beta, width, prune=prune, select=select)
    live, column = children >= 0, children.clamp_min(0).long()
    return GrownLayer(
        confidence=confidence,
        kept=kept,
        children=children,
        parents=torch.where(live, children // shape[2], -1),
        token_ids=torch.where(live, token_ids.flatten(1).gather(1, column), 0).long(),
        joint_log_prob=torch.where(live, joint.flatten(1).gather(1, column), -math.inf),
        path_entropy=torch.where(live, path.flatten(1).gather(1, column), 0.0),
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
