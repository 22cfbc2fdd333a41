"""What a planner of trees decides that chooses each step's width and depth, written out in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from c2t_plugin.planner import CostCurve
from tests.support.sglang.planned_rule import FORGET, FORGET_ONE, PROBE_EVERY, PROBES_COST, WHOLE_FIRST, Plan
from tests.support.sglang.tree_simulate import Path_

Shape = tuple[int, int]
Nodes = Sequence[tuple[float, Path_]]
# Draft rows are dear beyond those of a few trees, or of eight chains; rows of the target beyond two dozen.
CURVE = CostCurve(
    verify=((1, 1.0), (4, 1.06), (24, 1.7), (64, 20.0)),
    draft=((1, 0.02), (3, 0.03), (8, 0.05), (24, 1.2)),
    fixed=0.1,
    draft_extend=0.1,
)


@dataclass
class ShapedPlan(Plan):
    """widths: rising. worth: by width, of each number of layers the running means of a tree's nodes from the best on.
    trees: that they come from. width: of the step at hand. shapes: of all steps."""

    packed: bool = True
    curve: CostCurve = CURVE
    widths: tuple[int, ...] = (1, 3)
    d_max: int = 4
    most: int = 12
    width: int = 0
    worth: dict[int, list[list[float]]] = field(default_factory=dict)
    trees: dict[int, list[int]] = field(default_factory=dict)
    credit: float = 0.0
    shapes: list[Shape] = field(default_factory=list)
    probes: int = 0

    def shape(self, requests: int) -> Shape:
        """Width and depth of the next step."""
        found = self._shape(requests)
        self.width = found[0]
        self.shapes.append(found)
        return found

    def _shape(self, requests: int) -> Shape:
        whole = max(self.widths), self.d_max
        if self.trees.get(whole[0], [0])[-1] < WHOLE_FIRST:
            return whole
        all_of = {
            (width, depth): self._outcome(requests, width, depth)
            for width in self.widths
            for depth in range(1, self.d_max + 1)
        }
        order = list(all_of)
        # with no node verified two widths of depth 1 are one thing
        best = order[self.best([tokens / took for tokens, took in all_of.values()], ties=True)]
        return self._probe(best, whole, all_of)

    def _outcome(self, requests: int, width: int, depth: int) -> tuple[float, float]:
        """Tokens and seconds of a step that verifies as many nodes of each request as bring most per second."""
        means, self.width = self.worth[width][depth - 1], width
        outcomes = [
            (requests * (1 + sum(means[:nodes])), self.seconds(requests, requests * nodes, depth))
            for nodes in range(len(means) + 1)
        ]
        return max(outcomes, key=lambda outcome: outcome[0] / outcome[1])

    def _probe(self, best: Shape, whole: Shape, all_of: dict[Shape, tuple[float, float]]) -> Shape:
        (tokens, took), (brought, seconds) = all_of[best], all_of[whole]
        self.since += 1
        self.credit += PROBES_COST
        left = self.credit - (seconds - brought * took / tokens) / took
        if best != whole:
            if self.since < PROBE_EVERY:
                return best
            self.margin = min(self.margin, abs(left))
            if left < 0:
                return best
            self.probes += 1
        self.credit, self.since = 0.0, 0
        return whole

    def learn(self, shape: Shape, trees: Sequence[Nodes], chains: Sequence[Nodes]) -> None:
        """trees: of each request its nodes, what each is worth and its path. chains: what they hold of those of width
        1."""
        grown = self._learn(*shape, trees)
        if shape[0] == 1:
            for layers in self.worth[max(self.widths)]:
                layers[:] = [min(1.0, value * grown) for value in layers]
        else:
            held = [
                [
                    node
                    for node in chain
                    if all(node[1][: n + 1] in {path for _, path in tree} for n in range(len(node[1])))
                ]
                for chain, tree in zip(chains, trees, strict=True)
            ]
            self._learn(1, shape[1], held)

    def _learn(self, width: int, depth: int, trees: Sequence[Nodes]) -> float:
        nodes, requests = min(self.most, self.columns(width)), len(trees)
        means = self.worth.setdefault(width, [[0.0] * nodes for _ in range(self.d_max)])
        counts = self.trees.setdefault(width, [0] * self.d_max)
        before = sum(means[depth - 1])
        for layers in range(1, depth + 1):
            counts[layers - 1] += requests
            weight = max(min(FORGET, FORGET_ONE * requests), requests / counts[layers - 1])
            rows = [
                sorted((worth for worth, path in tree if len(path) <= layers), reverse=True) + [0.0] * nodes
                for tree in trees
            ]
            means[layers - 1] = [
                old + weight * (sum(row[n] for row in rows) / requests - old) for n, old in enumerate(means[layers - 1])
            ]
        grown = sum(means[depth - 1]) / before if before else 1.0
        for layers in means[depth:]:
            layers[:] = [min(1.0, value * grown) for value in layers]
        return grown

    def columns(self, width: int) -> int:
        """Nodes that a tree is drawn from."""
        return width + (self.d_max - 1) * width**2

    def seconds(self, requests: int, count: int, depth: int) -> float:
        curve = self.curve
        draft = (depth - 1) * curve.draft_s(requests * self.width)
        return float(curve.verify_s(torch.tensor(requests + count))) + draft + curve.fixed + curve.draft_extend
