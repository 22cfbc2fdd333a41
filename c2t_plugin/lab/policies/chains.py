"""Chains: one token after another, ended by a fixed length or by a rule on the newest token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.grow import Distributions, Growth
from c2t_plugin.lab.policies.base import (
    Certainty,
    Confidence,
    JointProb,
    LayerPolicy,
    Prob,
    Score,
    alive_where,
    between,
    sampled_children,
    scored,
    top_children,
)
from c2t_plugin.lab.token_tree import TokenTree
from c2t_plugin.lab.verify import Drafting, Draw, Pruning


@dataclass(frozen=True, kw_only=True)
class StaticChain(LayerPolicy):
    """d_max tokens, always: vanilla speculative decoding, and EAGLE in chain mode (C2T 5.5).

    temperature: 0 takes the most probable token; above 0 tokens are drawn from softmax(logits / temperature).
    """

    temperature: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0.0, math.inf, self, "temperature")

    @property
    def drafting(self) -> Drafting:
        return Drafting(Draw.INDEPENDENT if self.temperature else Draw.TOP_K, Pruning.BEFORE_SIBLINGS)

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        if self.temperature:
            return sampled_children(growth, distributions, self.top_m, 1, self.temperature, replacement=True)
        return top_children(growth, distributions, self.top_m, 1)


@dataclass(frozen=True, kw_only=True)
class StoppingChain(LayerPolicy):
    """A greedy chain that ends at its first token whose score is below a limit (C2T 5.5); equality goes on.

    keep_failing: whether the target verifies that token too. C2T drops it; the other papers do not say.
    """

    keep_failing: bool = False

    @property
    def rule(self) -> tuple[Score, float]:
        """The score and its least value."""
        raise NotImplementedError

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        score, least = self.rule
        block = scored(top_children(growth, distributions, self.top_m, 1), score)
        return block if self.keep_failing else alive_where(block, block.scores >= least)

    def may_grow(self, growth: Growth) -> Tensor:
        return growth.newest.alive & (growth.newest.scores >= self.rule[1])


@dataclass(frozen=True, kw_only=True)
class ThresholdChain(StoppingChain):
    """Ends where a probability falls below the threshold (C2T 5.5, table 3)."""

    score: ClassVar[Score]
    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0.0, 1.0, self, "threshold")

    @property
    def rule(self) -> tuple[Score, float]:
        return self.score, self.threshold


class DyMax(ThresholdChain):
    """The token's own probability decides (C2T 5.5, table 3)."""

    score = Prob()


class DyJoint(ThresholdChain):
    """The joint probability P decides (C2T 5.5, table 3): a threshold on P, in chains."""

    score = JointProb()


@dataclass(frozen=True, kw_only=True)
class EntropyStop(StoppingChain):
    """Ends where the entropy of the token's distribution exceeds max_entropy, in nats (entropy-shaped trees, 3.1)."""

    max_entropy: float

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0.0, math.inf, self, "max_entropy")

    @property
    def rule(self) -> tuple[Score, float]:
        return Certainty(), -self.max_entropy


@dataclass(frozen=True, kw_only=True)
class C2TChain(StoppingChain):
    """Ends where the classifier's confidence falls below beta (C2T 5.5). top_m is the classifier's."""

    classifier: NodeClassifier
    beta: float
    top_m: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "top_m", self.classifier.spec.top_m)
        super().__post_init__()
        between(0.0, 1.0, self, "beta")

    @property
    def rule(self) -> tuple[Score, float]:
        return Confidence(self.classifier), self.beta
