"""What layer-by-layer policies share: scores of nodes, and a base that drafts from all newest nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from c2t_kernels.network import NodeStats
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.grow import Distributions, Growth, LogitDistributions
from c2t_plugin.lab.token_tree import TokenTree, pack
from c2t_plugin.lab.verify import Drafting, Draw, Pruning
from c2t_plugin.trees.nodes import ROOT

PAPER_TOP_M = 1000


class Score(Protocol):
    """How promising a node is; larger is better."""

    def __call__(self, stats: NodeStats) -> Tensor:
        """Statistics of any shape (...) -> (...) float32."""


@dataclass(frozen=True)
class JointProb:
    """P, the product of draft probabilities from the root (EAGLE-2; C2T equation 1)."""

    def __call__(self, stats: NodeStats) -> Tensor:
        return stats.joint_log_prob.exp()


@dataclass(frozen=True)
class Prob:
    """The node's own draft probability."""

    def __call__(self, stats: NodeStats) -> Tensor:
        return stats.log_prob.exp()


@dataclass(frozen=True)
class Certainty:
    """Entropy with its sign turned, nats (entropy-shaped trees, section 3.1)."""

    def __call__(self, stats: NodeStats) -> Tensor:
        return -stats.entropy


@dataclass(frozen=True, eq=False)
class Confidence:
    """The classifier's confidence C (C2T equation 4)."""

    classifier: NodeClassifier

    def __call__(self, stats: NodeStats) -> Tensor:
        with torch.no_grad():
            return self.classifier.confidence(stats)


@dataclass(frozen=True, kw_only=True)
class LayerPolicy:
    """Drafts from all newest live nodes until d_max, and lets the target verify all live nodes.

    Subclasses say in `branch` which nodes there are, and in `drafting` how, if tokens are drawn.
    d_max: depth of the deepest nodes, 1 for a root's children. top_m: how many of the largest probabilities the entropy
    sums over.
    """

    d_max: int
    top_m: int = PAPER_TOP_M

    def __post_init__(self) -> None:
        at_least(1, self, "d_max", "top_m")

    @property
    def drafting(self) -> Drafting:
        """Most probable tokens, cut by anything: nothing but the target's own choice may decide about them."""
        return Drafting(Draw.TOP_K, Pruning.OWN_DRAW)

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        raise NotImplementedError

    def expand(self, growth: Growth) -> Tensor:
        return newest_columns(growth, self.may_grow(growth)) if growth.depth < self.d_max else no_columns(growth)

    def may_grow(self, growth: Growth) -> Tensor:
        """Which of the newest nodes to draft from: (batch, newest nodes) bool."""
        return growth.newest.alive

    def finish(self, tree: TokenTree) -> Tensor:
        return tree.alive


def top_children(growth: Growth, distributions: Distributions, top_m: int, k: int) -> TokenTree:
    """The k most probable children of every node of the frontier; their scores are joint probabilities."""
    return growth.children(distributions.stats(top_m, k))


def sampled_children(
    growth: Growth, distributions: Distributions, top_m: int, k: int, temperature: float, replacement: bool
) -> TokenTree:
    """k children of every node of the frontier, drawn from softmax(logits / temperature), in the order drawn.

    replacement: independent draws, so that siblings may be equal; else fewer than k where tokens run out. Probabilities
    and statistics are those of the distribution at that temperature. Randomness comes from the growth's generator.
    """
    logits = distributions.logits().float() / temperature
    batch, width, vocab = logits.shape
    stats = LogitDistributions(logits).stats(top_m, 1)
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp().nan_to_num(0.0)
    if replacement:
        # a row without a distribution must not stop the others; its log probabilities are NaN, so its children are dead
        probs[probs.sum(-1) == 0] = 1.0
        tokens = torch.multinomial(probs.flatten(0, 1), k, True, generator=growth.generator).unflatten(
            0, (batch, width)
        )
    else:
        # the largest p / e with e exponential is a draw from p, the next one a draw from the rest
        race = probs / torch.empty_like(probs).exponential_(generator=growth.generator)
        tokens = race.topk(min(k, vocab), dim=-1).indices
    return growth.children(stats, (tokens, log_probs.gather(-1, tokens)))


def scored(block: TokenTree, score: Score) -> TokenTree:
    """The block with another score; nodes whose score is not a number are dead."""
    scores = score(block.stats())
    return replace(block, scores=scores, alive=block.alive & ~scores.isnan())


def alive_where(block: TokenTree, mask: Tensor) -> TokenTree:
    """The block with only the nodes in the mask alive, (batch, nodes) bool."""
    return replace(block, alive=block.alive & mask)


def newest_columns(growth: Growth, mask: Tensor) -> Tensor:
    """Columns of those of the newest nodes that are in the mask, as `expand` returns them."""
    columns = pack(mask)
    return torch.where(columns >= 0, columns + growth.first, ROOT)


def no_columns(growth: Growth) -> Tensor:
    """What `expand` returns to end growth."""
    return torch.full((growth.batch, 0), ROOT)


def at_least(least: int, policy: object, *names: str) -> None:
    """ConfigError unless these fields are integers of at least `least`."""
    for name in names:
        value = getattr(policy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{type(policy).__name__}: {name} must be an integer of at least {least}, got {value!r}")


def between(low: float, high: float, policy: object, *names: str) -> None:
    """ConfigError unless these fields are numbers in [low, high]."""
    for name in names:
        value = getattr(policy, name)
        if not isinstance(value, (int, float)) or math.isnan(value) or not low <= value <= high:
            expected = f"a number of at least {low}" if high == math.inf else f"a number in [{low}, {high}]"
            raise ConfigError(f"{type(policy).__name__}: {name} must be {expected}, got {value!r}")
