"""Entropy-shaped trees (Gunjur and Waitz, S4): the draft's uncertainty decides how wide and how deep a tree is.

Early stopping, their chain, is `chains.EntropyStop`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.grow import Distributions, Growth
from c2t_plugin.lab.policies.base import LayerPolicy, alive_where, at_least, between, top_children
from c2t_plugin.lab.token_tree import TokenTree
from c2t_plugin.trees.published import EntropyWidth


@dataclass(frozen=True, kw_only=True)
class NaiveWidth(LayerPolicy):
    """A greedy chain that, where the entropy exceeds max_entropy, ends in the k most probable tokens (S4 3.1).

    The paper names no k. A chain that reaches d_max ends in one token.
    """

    k: int
    max_entropy: float

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "k")
        between(0.0, math.inf, self, "max_entropy")

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        block = top_children(growth, distributions, self.top_m, self.k)
        return alive_where(block, (block.rank == 0) | (block.entropy > self.max_entropy))

    def may_grow(self, growth: Growth) -> Tensor:
        return growth.newest.alive & (growth.newest.entropy <= self.max_entropy)


@dataclass(frozen=True, kw_only=True)
class DynamicWidth(LayerPolicy):
    """B(H) children of every node, H the entropy of what follows it; fixed depth (S4 4, the expression for B).

    sure, unsure, factor, widest: see EntropyWidth. Entropies in nats.
    """

    sure: float = EntropyWidth.sure
    unsure: float = EntropyWidth.unsure
    factor: float = EntropyWidth.factor
    widest: int = EntropyWidth.widest

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0.0, math.inf, self, "sure", "unsure", "factor")
        at_least(2, self, "widest")
        if self.sure > self.unsure:
            raise ConfigError(f"{type(self).__name__}: sure ({self.sure}) must not exceed unsure ({self.unsure})")

    def width(self, entropy: Tensor) -> Tensor:
        """B(H): (...) float32 nats -> (...) int64."""
        return EntropyWidth(self.sure, self.unsure, self.factor, self.widest).of(entropy)

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        block = top_children(growth, distributions, self.top_m, self.widest)
        return alive_where(block, block.rank < self.width(block.entropy))


@dataclass(frozen=True, kw_only=True)
class DynamicWidthDepth(DynamicWidth):
    """B(H) children, and none where the entropy exceeds max_entropy (S4 3.2: "setting the branching factor to 0").

    The paper does not print its rule for the depth; keep_failing gives the stopping node's B(H) children to the target
    without drafting from them.
    """

    max_entropy: float
    keep_failing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0.0, math.inf, self, "max_entropy")

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        block = super().branch(growth, distributions)
        return block if self.keep_failing else alive_where(block, block.entropy <= self.max_entropy)

    def may_grow(self, growth: Growth) -> Tensor:
        return growth.newest.alive & (growth.newest.entropy <= self.max_entropy)
