"""The trees of C2T's rivals in plain Python, each by its paper's rule, for tree_simulate.Forest.

Nothing of SGLang or of the method's own code is used. Slots of one shape leave two limits on each rule: at most `topk`
children per node, and the `topk` most probable nodes of a layer to draft from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.sglang.tree_simulate import TIE, Path_, PathDraft, TreeRule

TOP_M = 1000
# Entropies at which the number of children changes, of at most 4.
STEPS = (0.02, 1.0)


@dataclass(frozen=True)
class Child:
    """A word after a path. ranks: of the words on its way. before: probability of its more probable siblings.

    entropy: of the distribution that it is from.
    """

    path: Path_ = ()
    ranks: Path_ = ()
    joint: float = 1.0
    above: float = 1.0
    before: float = 0.0
    entropy: float = 0.0


def always(_: Child) -> bool:
    return True


@dataclass
class RivalRule:
    """wanted: which children belong to the tree. grows: which of them may be drafted from. value: of too many those of
    the highest are verified; no child is worth more than its parent."""

    topk: int
    depth: int
    max_nodes: int
    wanted: Callable[[Child], bool] = always
    grows: Callable[[Child], bool] = always
    value: Callable[[Child], float] = lambda child: child.joint
    undecided: bool = False

    def grow(self, draft: PathDraft) -> set[Path_]:
        """Paths of the nodes that are verified."""
        tree, frontier = [], [Child()]
        for _ in range(self.depth):
            layer = [child for child in self.children(draft, frontier) if self.wanted(child)]
            tree += layer
            frontier = self.best([child for child in layer if self.grows(child)], self.topk, lambda child: child.joint)
            if not frontier:
                break
        return {child.path for child in self.best(tree, self.max_nodes, self.value)}

    def children(self, draft: PathDraft, frontier: Sequence[Child]) -> list[Child]:
        found = []
        rows = draft.logits([node.path for node in frontier]).double().softmax(-1)
        for node, row in zip(frontier, rows, strict=True):
            values, words = row.sort(descending=True)
            probs = values.tolist()
            entropy = -sum(p * math.log(p) for p in probs[:TOP_M] if p > 0)
            self.undecided |= any(abs(entropy - step) < TIE for step in STEPS)
            self.undecided |= probs[self.topk - 1] - probs[self.topk] < TIE * probs[self.topk]
            for rank, word in enumerate(words[: self.topk].tolist()):
                place = (*node.path, word), (*node.ranks, rank)
                found.append(Child(*place, node.joint * probs[rank], node.joint, sum(probs[:rank]), entropy))
        return found

    def best(self, children: Sequence[Child], count: int, value: Callable[[Child], float]) -> list[Child]:
        """The `count` of highest value, of equal ones those that were drafted first."""
        ordered = sorted(children, key=lambda child: -value(child))
        if len(ordered) > count:
            last, left_out = value(ordered[count - 1]), value(ordered[count])
            # what is left of 1 has the rounding of 1
            self.undecided |= last - left_out < TIE * last + 1e-7
        return ordered[:count]


def dyspec(topk: int, depth: int, max_nodes: int) -> RivalRule:
    """A sampling is worth the probability that it is made: its parent is accepted, its siblings before it are not."""
    return RivalRule(topk, depth, max_nodes, value=lambda child: child.above * (1 - child.before))


def entropy(topk: int, depth: int, max_nodes: int) -> RivalRule:
    """One child below 0.02 nats, two below 1, then four per nat."""

    def wanted(child: Child) -> bool:
        sure, unsure = STEPS
        count = 1 if child.entropy < sure else 2 if child.entropy < unsure else min(math.ceil(4 * child.entropy), 7)
        return child.ranks[-1] < count

    return RivalRule(topk, depth, max_nodes, wanted)


def static(topk: int, depth: int, max_nodes: int, paths: Collection[Path_]) -> RivalRule:
    """The nodes on these paths of ranks, whatever the draft says."""
    parents = {path[:-1] for path in paths}
    return RivalRule(
        topk, depth, max_nodes, lambda child: child.ranks in paths, grows=lambda child: child.ranks in parents
    )


@dataclass
class JointProb:
    """In place of verify_counts.Rule: the confidence is the joint probability."""

    beta: float
    undecided: bool = False
    spec: dict[str, Any] = field(default_factory=lambda: {"top_m": TOP_M})

    def confidence(self, joint_log_prob: float, entropy: float, depth: int, path_entropy: float) -> float:
        return math.exp(joint_log_prob)


def prob(topk: int, depth: int, max_nodes: int, beta: float) -> TreeRule:
    """The paper's tree with a threshold on the joint probability."""
    return TreeRule(JointProb(beta), topk, depth, max_nodes)  # type: ignore[arg-type]
