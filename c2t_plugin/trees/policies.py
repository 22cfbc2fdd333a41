"""Rules by which a tree grows in fixed slots: every layer has the same shape, so it fits a CUDA graph.

A layer are the k most probable children of each node of a frontier (the first top-K). A rule says which of them belong
to the tree and which are drafted from next, at most `width` of them. The core's policies are the same rules without
slots and judge these in tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from c2t_kernels import DraftStats, GrownLayer, ScoringNetwork, grow_layer
from c2t_kernels.growth import select_children
from c2t_kernels.network import PathSums, extend_path


class Frontier(NamedTuple):
    """The nodes that a layer is drafted from, (bs, slots) each, as grow_layer takes them."""

    joint_log_prob: Tensor
    path_entropy: Tensor
    alive: Tensor


class SlotPolicy(Protocol):
    """One rule. It keeps no state. width: nodes drafted from per layer, and children scored of each.

    cuts: whether nodes below beta are cut.
    """

    cuts: ClassVar[bool]

    @property
    def width(self) -> int: ...

    def layer(self, frontier: Frontier, stats: DraftStats, beta: Tensor, depth: int) -> GrownLayer:
        """Grow one layer: arguments and result as of grow_layer, beta (bs,) float32.

        `confidence` is what the tree's size limit goes by: of too many nodes, those of the lowest are dropped.
        """


@dataclass(frozen=True, eq=False)
class C2TSlots:
    """The paper's: below beta a node is cut, and of the rest the `width` of highest confidence stay (C2T 4.2)."""

    cuts: ClassVar[bool] = True
    network: ScoringNetwork
    width: int

    def layer(self, frontier: Frontier, stats: DraftStats, beta: Tensor, depth: int) -> GrownLayer:
        return grow_layer(self.network, *frontier, stats, beta, depth, width=self.width)


@dataclass(frozen=True)
class ProbSlots:
    """The same with the joint probability in place of the confidence."""

    cuts: ClassVar[bool] = True
    width: int

    def layer(self, frontier: Frontier, stats: DraftStats, beta: Tensor, depth: int) -> GrownLayer:
        children = Children.of(frontier, stats)
        return children.grown(children.prob, *select_children(children.prob, children.possible, beta, self.width))


@dataclass(frozen=True)
class Eagle2Slots:
    """EAGLE-2's: the `width` of highest joint probability are drafted from; the best of all children are verified."""

    cuts: ClassVar[bool] = False
    width: int

    def layer(self, frontier: Frontier, stats: DraftStats, beta: Tensor, depth: int) -> GrownLayer:
        children = Children.of(frontier, stats)
        return children.grown(children.prob, children.possible, children.most_probable(children.possible, self.width))


@dataclass(frozen=True)
class DySpecSlots:
    """DySpec's with the most probable tokens in place of drawn ones, at temperature 1 (its algorithms 1 and 2).

    A child's value is the probability that its sampling is made: that its parent is accepted and its more probable
    siblings are not. The nodes of highest value are verified, as in its greedy construction.
    """

    cuts: ClassVar[bool] = False
    width: int

    def layer(self, frontier: Frontier, stats: DraftStats, beta: Tensor, depth: int) -> GrownLayer:
        children = Children.of(frontier, stats)
        probs = stats.log_probs.exp().reshape(*frontier.alive.shape, -1)
        before = probs.cumsum(-1) - probs
        value = (frontier.joint_log_prob.exp()[..., None] * (1 - before).clamp_min(0)).flatten(1)
        return children.grown(value, children.possible, children.most_probable(children.possible, self.width))


@dataclass(frozen=True)
class Children:
    """All children of a layer, (bs, slots * k): log P, entropies on the way, whether there is such a child, and the
    draft's statistics."""

    joint_log_prob: Tensor
    path_entropy: Tensor
    possible: Tensor
    stats: DraftStats

    @classmethod
    def of(cls, frontier: Frontier, stats: DraftStats) -> Children:
        log_prob = stats.log_probs.reshape(*frontier.alive.shape, -1)
        above = PathSums(frontier.joint_log_prob[..., None], frontier.path_entropy[..., None])
        # not the features' `children`: nothing here reads the rest of what that makes
        path = extend_path(above, log_prob, stats.entropy.reshape(frontier.alive.shape)[..., None])
        possible = frontier.alive[..., None] & torch.isfinite(log_prob)
        entropies = path.path_entropy.expand(log_prob.shape)
        return cls(path.joint_log_prob.flatten(1), entropies.flatten(1), possible.flatten(1), stats)

    @property
    def prob(self) -> Tensor:
        """0 where there is no such child."""
        return self.joint_log_prob.exp() * self.possible

    def most_probable(self, candidates: Tensor, width: int) -> Tensor:
        """Columns of the `width` candidates of highest P, of equal ones the lower first: (bs, width) int32, -1 pads."""
        return select_children(self.joint_log_prob, candidates, 0.0, width, prune=False, select=False)[1]

    def grown(self, score: Tensor, kept: Tensor, children: Tensor) -> GrownLayer:
        """The layer with these children in the frontier; score: (bs, slots * k) float32."""
        live, column = children >= 0, children.clamp_min(0).long()
        return GrownLayer(
            confidence=score,
            kept=kept,
            children=children,
            parents=torch.where(live, children // self.stats.log_probs.shape[1], -1),
            token_ids=self.stats.token_ids.reshape(kept.shape).gather(1, column).masked_fill(~live, 0),
            joint_log_prob=self.joint_log_prob.gather(1, column).masked_fill(~live, -torch.inf),
            path_entropy=self.path_entropy.gather(1, column).masked_fill(~live, 0.0),
            alive=live,
        )
