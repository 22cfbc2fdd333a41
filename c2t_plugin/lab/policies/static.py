"""Trees whose shape does not depend on the text: every node has its place from the start."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.grow import Distributions, Growth
from c2t_plugin.lab.policies.base import (
    LayerPolicy,
    alive_where,
    at_least,
    between,
    sampled_children,
    top_children,
)
from c2t_plugin.lab.token_tree import TokenTree
from c2t_plugin.lab.verify import Drafting, Draw, Pruning
from c2t_plugin.trees.published import RankPath


@dataclass(frozen=True, kw_only=True)
class StaticTree(LayerPolicy):
    """A tree given by the ranks on the way to each node (EAGLE-1 appendix A; C2T v1 appendix A): (0, 2) is the third
    child of the root's first child.

    paths: one per node, in any order, parents included; d_max follows. temperature: 0 takes the most probable
    children; above 0 siblings are drawn without replacement from softmax(logits / temperature), rank by order drawn.
    A place whose token has no probability stays empty, with all below it.
    """

    paths: tuple[RankPath, ...]
    temperature: float = 0.0
    d_max: int = field(init=False)

    def __post_init__(self) -> None:
        known = {(), *self.paths}
        for path in self.paths:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise ConfigError(f"{type(self).__name__}: path {path} must be ranks of at least 0 below a known path")
        if len(known) != len(self.paths) + 1 or not self.paths:
            raise ConfigError(f"{type(self).__name__}: {len(self.paths)} paths; at least one is needed, none twice")
        object.__setattr__(self, "d_max", max(map(len, self.paths)))
        super().__post_init__()
        between(0.0, math.inf, self, "temperature")

    @property
    def drafting(self) -> Drafting:
        return Drafting(Draw.WITHOUT_REPLACEMENT if self.temperature else Draw.TOP_K, Pruning.BEFORE_SIBLINGS)

    @cached_property
    def _places(self) -> Tensor:
        """(1 + nodes, widest) int64: place of each place's children by rank, -1 where there is none; 0 is the root."""
        number = {path: place for place, path in enumerate(((), *self.paths))}
        table = torch.full((len(number), 1 + max(path[-1] for path in self.paths)), -1)
        for path in self.paths:
            table[number[path[:-1]], path[-1]] = number[path]
        return table

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        if growth.depth == 1:
            at = torch.zeros_like(growth.frontier)
        else:
            at = growth.memory.gather(1, (growth.frontier - growth.first).clamp_min(0))
        widest = self._places.shape[1]
        if self.temperature:
            block = sampled_children(growth, distributions, self.top_m, widest, self.temperature, replacement=False)
        else:
            block = top_children(growth, distributions, self.top_m, widest)
        # a vocabulary may have fewer tokens than a node has children
        growth.memory = self._places[at][..., : block.nodes // at.shape[1]].flatten(1)
        return alive_where(block, growth.memory >= 0)

    def may_grow(self, growth: Growth) -> Tensor:
        grows = (self._places >= 0).any(1)
        return growth.newest.alive & grows[growth.memory.clamp_min(0)]


@dataclass(frozen=True, kw_only=True)
class LayerBranches(LayerPolicy):
    """Every node of a layer has the same number of children: branches[0] below the root, and so on (DySpec figure 1c);
    d_max follows.

    temperature: 0 takes the most probable children; above 0 they are drawn independently from softmax(logits /
    temperature), so that siblings may be equal.
    """

    branches: tuple[int, ...]
    temperature: float = 0.0
    d_max: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.branches or any(not isinstance(count, int) or count < 1 for count in self.branches):
            raise ConfigError(
                f"{type(self).__name__}: branches must be integers of at least 1, at least one of them, "
                f"got {self.branches}"
            )
        object.__setattr__(self, "d_max", len(self.branches))
        super().__post_init__()
        between(0.0, math.inf, self, "temperature")

    @property
    def drafting(self) -> Drafting:
        return Drafting(Draw.INDEPENDENT if self.temperature else Draw.TOP_K, Pruning.BEFORE_SIBLINGS)

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        k = self.branches[growth.depth - 1]
        if self.temperature:
            return sampled_children(growth, distributions, self.top_m, k, self.temperature, replacement=True)
        return top_children(growth, distributions, self.top_m, k)


@dataclass(frozen=True, kw_only=True)
class FixedBranching(LayerBranches):
    """width children of every node, depth layers: the static tree that S4's figure 6 compares with (2 wide, 4 deep)."""

    width: int
    depth: int
    branches: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        at_least(1, self, "width", "depth")
        object.__setattr__(self, "branches", (self.width,) * self.depth)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class IndependentSequences(LayerBranches):
    """k chains from the root (SpecTr's shape, DySpec figure 1b).

    With a temperature the chains are drawn independently, as SpecTr needs; without one they start at the k most
    probable tokens, since k greedy chains would all be the same.
    """

    sequences: int
    length: int
    branches: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        at_least(1, self, "sequences", "length")
        object.__setattr__(self, "branches", (self.sequences,) + (1,) * (self.length - 1))
        super().__post_init__()
