"""C2T's trees: layer by layer, a node that is not promising enough is cut at once (C2T 4.2, algorithm 1)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.grow import Distributions, Growth
from c2t_plugin.lab.policies.base import (
    Confidence,
    LayerPolicy,
    Score,
    alive_where,
    at_least,
    between,
    scored,
    top_children,
)
from c2t_plugin.lab.token_tree import TokenTree
from c2t_plugin.trees.nodes import best


@dataclass(frozen=True, kw_only=True)
class ThresholdTree(LayerPolicy):
    """C2T's construction (4.2, algorithm 1) with any score: with JointProb the threshold on P, its rival.

    A node below beta is cut, with all that would follow it; equality keeps. The kept nodes are what is drafted from
    next and what the target verifies. Growth ends at d_max or in a layer that keeps no node.
    first_k: children per node to score, by draft probability (4.2.2, purpose 1); None scores the whole vocabulary.
    second_k: nodes kept per layer, by score (4.2.2, purpose 2); None keeps all that pass.
    """

    score: Score
    beta: float
    first_k: int | None = 15
    second_k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0.0, 1.0, self, "beta")
        at_least(1, self, *(name for name in ("first_k", "second_k") if getattr(self, name) is not None))

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        block = top_children(growth, distributions, self.top_m, self.first_k or sys.maxsize)
        block = scored(block, self.score)
        block = alive_where(block, block.scores >= self.beta)
        return alive_where(block, best(block.scores, block.alive, self.second_k)) if self.second_k else block


@dataclass(frozen=True, kw_only=True)
class C2TTree(ThresholdTree):
    """The classifier's confidence decides (C2T 4.2, algorithm 1). top_m is the classifier's."""

    classifier: NodeClassifier
    score: Score = field(init=False)
    top_m: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "score", Confidence(self.classifier))
        object.__setattr__(self, "top_m", self.classifier.spec.top_m)
        super().__post_init__()
