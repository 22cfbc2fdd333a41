"""C2T's trees simulated with transformers and plain Python, as an oracle for servers in tree mode.

Nothing of SGLang or of the method's own code is used: a tree grows from the logits after each path, which a draft
computes anew over all tokens above, and greedy verification follows the output of plain decoding, known beforehand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from tests.support.sglang import verify_counts as vc
from tests.support.sglang.simulate import Draft, EagleHead, StandaloneDraft, Target, load_draft

Path_ = tuple[int, ...]
# Server and simulation sum the same numbers in another order: relative error of what is compared.
TIE = 1e-5


class PathRule(Protocol):
    """How a tree grows. undecided: whether rounding may have decided about one."""

    @property
    def undecided(self) -> bool: ...

    def grow(self, draft: PathDraft) -> set[Path_]:
        """Paths of the kept nodes."""


class PathDraft(Protocol):
    """What follows paths of drafted tokens below one root."""

    def logits(self, paths: Sequence[Path_]) -> torch.Tensor:
        """(paths, V) logits after each path; all paths of one length, their parents asked for before."""


@dataclass
class StandalonePaths:
    """A stand-alone draft reads the committed tokens but the first, then the path."""

    draft: StandaloneDraft
    tokens: Sequence[int]

    @torch.no_grad()
    def logits(self, paths: Sequence[Path_]) -> torch.Tensor:
        rows = torch.tensor([[*self.tokens[1:], *path] for path in paths])
        return self.draft.model(rows, use_cache=False, logits_to_keep=1).logits[:, -1]


@dataclass
class HeadPaths:
    """A head reads for a drafted token its own state of the entry above."""

    head: EagleHead
    tokens: Sequence[int]
    features: torch.Tensor
    hidden: dict[Path_, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def logits(self, paths: Sequence[Path_]) -> torch.Tensor:
        rows = []
        for path in paths:
            hidden = self.hidden[path[:-1]] if path else self.head.project(self.features)
            ids = torch.tensor([*self.tokens[1:], *path])
            state = self.head.layer(self.head.embedding[ids], hidden)
            self.hidden[path] = torch.cat([hidden, state[-1:]])
            rows.append(self.head.logits(state[-1]))
        return torch.stack(rows)


@dataclass(frozen=True)
class Node:
    """A node on its way: lowest confidence above it, joint log probability and sum of entropies down to it."""

    confidence: float = math.inf
    joint: float = 0.0
    path_entropy: float = 0.0
    above: float = math.inf
    path: Path_ = ()

    @property
    def least(self) -> float:
        """The lowest confidence on the way, its own one included."""
        return min(self.confidence, self.above)


@dataclass
class TreeRule:
    """The paper's tree in plain Python: first top-K by probability, beta, second top-K by confidence, a size limit."""

    rule: vc.Rule
    topk: int
    depth: int
    max_nodes: int

    @property
    def undecided(self) -> bool:
        """Whether rounding may have decided about a tree."""
        return self.rule.undecided

    def grow(self, draft: PathDraft) -> set[Path_]:
        """Paths of the kept nodes."""
        return {path for _, path in self.nodes(draft)}

    def nodes(self, draft: PathDraft) -> list[tuple[float, Path_]]:
        """The kept nodes from the surest on: the lowest confidence on the way from the root, path."""
        kept: list[tuple[float, Path_]] = []
        frontier = [Node()]
        for depth in range(1, self.depth + 1):
            children = self.children(draft, frontier, depth)
            passing = [child for child in children if child.confidence >= self.rule.beta]
            # stable: of equal confidences the one that was drafted first
            passing.sort(key=lambda child: -child.confidence)
            self.near_tie([child.confidence for child in passing], self.topk)
            frontier = passing[: self.topk]
            kept += [(child.least, child.path) for child in children if child in frontier]
            if not frontier:
                break
        # A node that is surer than one above it goes by that one's confidence: such ties go to the one drafted first.
        kept.sort(key=lambda node: -node[0])
        self.near_tie([least for least, _ in kept], self.max_nodes)
        return kept[: self.max_nodes]

    def children(self, draft: PathDraft, frontier: list[Node], depth: int) -> list[Node]:
        """The topk children of every node."""
        found = []
        rows = draft.logits([node.path for node in frontier]).double().log_softmax(-1)
        for node, row in zip(frontier, rows, strict=True):
            values, words = row.sort(descending=True)
            self.near_tie(values.tolist(), self.topk)
            probs = values[: self.rule.spec["top_m"]].exp().tolist()
            entropy = -sum(p * math.log(p) for p in probs if p > 0)
            path_entropy = node.path_entropy + entropy
            for value, word in zip(values[: self.topk].tolist(), words[: self.topk].tolist(), strict=True):
                joint = node.joint + value
                confidence = self.rule.confidence(joint, entropy, depth, path_entropy)
                # no confidence falls below 0
                self.rule.undecided |= self.rule.beta > 0 and abs(confidence - self.rule.beta) < vc.UNDECIDED
                found.append(Node(confidence, joint, path_entropy, node.least, (*node.path, word)))
        return found

    def near_tie(self, values: list[float], count: int) -> None:
        """Note it if rounding may decide which of the largest `count` are the last."""
        if len(values) > count:
            self.rule.undecided |= 0 < values[count - 1] - values[count] < TIE * abs(values[count])


@dataclass
class Forest:
    """Everything that the simulations of one pair share; results are kept, since several tests ask for the same."""

    pair: Path
    target: Target
    new_tokens: int = vc.NEW_TOKENS
    known: dict[tuple, vc.Counts | None] = field(default_factory=dict)
    texts: dict[tuple[int, ...], tuple[list[int], list[torch.Tensor]]] = field(default_factory=dict)
    drafts: dict[str, Draft] = field(default_factory=dict)

    def text(self, prompt: Sequence[int], beyond: int = 9) -> tuple[list[int], list[torch.Tensor]]:
        """The prompt with plain decoding's output, some tokens more than asked for, and the target's states of it."""
        key = tuple(prompt)
        if key not in self.texts:
            tokens = [*prompt, *self.target.greedy(prompt, self.new_tokens + beyond)]
            self.texts[key] = tokens, self.target.run(tokens)[1]
        return self.texts[key]

    def plain(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Plain decoding's output."""
        return tuple(self.text(prompt)[0][len(prompt) :][: self.new_tokens])

    def counts(
        self, base: str, prompt: Sequence[int], classifier: Path, beta: float, topk: int, depth: int, max_nodes: int
    ) -> vc.Counts | None:
        """Output, verify steps and tree sizes; None if a confidence is too near to beta, or to another, to tell."""
        key = (base, tuple(prompt), classifier, beta, topk, depth, max_nodes)
        if key not in self.known:
            rule = TreeRule(vc.Rule(classifier, beta), topk, depth, max_nodes)
            self.known[key] = self.simulated(base, prompt, rule)
        return self.known[key]

    def simulated(self, base: str, prompt: Sequence[int], rule: PathRule) -> vc.Counts | None:
        """The same by any rule, that has grown no tree yet."""
        sizes = self.steps(base, prompt, rule)
        lengths = tuple(sorted(Counter(sizes).items()))
        return None if rule.undecided else vc.Counts(self.plain(prompt), len(sizes), lengths)

    def steps(self, base: str, prompt: Sequence[int], rule: PathRule) -> list[int]:
        """Tree sizes of the verify steps."""
        committed, sizes = len(prompt) + 1, []
        while committed - len(prompt) < self.new_tokens:
            tree = rule.grow(self.draft(base, prompt, committed))
            committed += self.accepted(prompt, committed, tree) + 1
            sizes.append(len(tree))
        return sizes

    def draft(self, base: str, prompt: Sequence[int], committed: int) -> PathDraft:
        """Below the newest of so many committed tokens."""
        if base not in self.drafts:
            self.drafts[base] = load_draft(self.pair, vc.DRAFTS[base], self.target)
        draft = self.drafts[base]
        tokens, states = self.text(prompt)
        # the newest token has not been through the target
        features = draft.features([state[: committed - 1] for state in states])
        if features is None:
            return StandalonePaths(draft, tokens[:committed])  # type: ignore[arg-type]
        return HeadPaths(draft, tokens[:committed], features)  # type: ignore[arg-type]

    def accepted(self, prompt: Sequence[int], committed: int, tree: set[Path_]) -> int:
        """Nodes of the tree on the way of plain decoding's output, which is known beforehand."""
        tokens, hits = self.text(prompt)[0], 0
        while tuple(tokens[committed : committed + hits + 1]) in tree:
            hits += 1
        return hits


def assert_as_simulated(found: Sequence[vc.Counts], expected: Sequence[vc.Counts | None], tolerated: int = 1) -> None:
    """Every request's output, verify steps and tree sizes; of the undecided ones the output alone, `tolerated` many."""
    decided = [(mine, theirs) for mine, theirs in zip(found, expected, strict=True) if theirs is not None]
    assert len(found) - len(decided) <= tolerated, "too many confidences lie at beta or at each other: choose another"
    assert [mine for mine, _ in decided] == [theirs for _, theirs in decided]
