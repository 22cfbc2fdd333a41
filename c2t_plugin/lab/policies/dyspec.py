"""DySpec's trees: always the sampling that is most likely to be reached next (Xiong et al., 2024).

One file for both constructions, because they differ only in the order in which they take the same steps.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from c2t_kernels.network import PathSums, SiblingStats, extend_path
from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.grow import Distributions, Growth, LogitDistributions
from c2t_plugin.lab.policies.base import PAPER_TOP_M, at_least, between, newest_columns
from c2t_plugin.lab.token_tree import DTYPES, TokenTree
from c2t_plugin.lab.verify import Chance, Drafting, Draw, Pruning, Sampler, probabilities
from c2t_plugin.trees.nodes import ROOT

READINGS = ("reach", "joint")
AT_ROOT = PathSums(0.0, 0.0)


class Node(NamedTuple):
    """One new node; the fields of TokenTree, those of its path and of its distribution together."""

    token_ids: int
    parent_ids: int
    depths: int
    log_probs: float
    path: PathSums
    shared: SiblingStats
    rank: int
    scores: float

    def columns(self) -> dict[str, float]:
        """By the names of TokenTree's fields."""
        own = self._asdict()
        del own["path"], own["shared"]
        path = {"joint_log_probs": self.path.joint_log_prob, "path_entropy": self.path.path_entropy}
        return {**own, **path, **self.shared._asdict()}


@dataclass
class Position:
    """A place where siblings can be added: below one node of one tree.

    column: the node, -1 the root. depth, path: of that node. reach: v of algorithm 1, the estimated
    probability that the next sampling here is made: the path to the node is accepted, the siblings so far rejected.
    tokens: (listed,) int64 and probs: (listed,) float64, D after the node, None until it is drafted from. left:
    (listed,) R of algorithm 1, D without the siblings so far, renormalised. beyond: R's mass on tokens that are not
    listed. shared: statistics of D. taken: siblings so far.
    """

    column: int
    depth: int
    path: PathSums
    reach: float
    tokens: Tensor | None = None
    probs: Tensor | None = None
    left: Tensor | None = None
    beyond: float = 0.0
    shared: SiblingStats | None = None
    taken: int = 0


class Known(NamedTuple):
    """Distributions of a frontier at the draft's temperature, listed in part or whole.

    tokens: (batch, width, listed) int64. probs: (batch, width, listed) float64. shared: (batch, width) float32 each.
    """

    tokens: Tensor
    probs: Tensor
    shared: SiblingStats

    def fill(self, position: Position, row: int, branch: int) -> None:
        """Give a position its distribution; one that is not finite leaves no token to take."""
        position.tokens = self.tokens[row, branch]
        position.probs = self.probs[row, branch].nan_to_num(0.0)
        position.left = position.probs
        position.beyond = max(0.0, 1.0 - float(position.probs.sum()))
        position.shared = SiblingStats(*(float(value[row, branch]) for value in self.shared))


@dataclass(frozen=True, kw_only=True)
class DySpec:
    """What both constructions share: the next sibling is taken from the residual of the draft's distribution.

    temperature: of the draft; 0.6 in the paper's experiments. Probabilities and statistics are those at it.
    sampled: children are drawn without replacement, from the growth's generator, for verify_without_replacement; else
        the next child is the most probable token left (ties: the lower id), for verify_greedy and verify_target_only.
    reading: what a node's value is. "reach" (appendix D, algorithms 1 and 2): v, how likely its sampling is to be made,
        whatever token comes of it. "joint" (appendix D.1): its joint probability v * R[y], which a tree of most
        probable tokens may look at; a sampled one may not, or the output would be biased.
    d_max: depth of the deepest nodes; None is no limit, as in the paper. top_m: as for every policy's entropy.
    max_children: most siblings below one node; None is no limit, as in the paper. With it, most probable tokens at
        temperature 1 need nothing but statistics, so that a record without logits can be replayed.

    Scores of the nodes are their values. Siblings stand in the order they were taken in.
    """

    temperature: float = 0.6
    sampled: bool = False
    reading: str = "reach"
    d_max: int | None = None
    top_m: int = PAPER_TOP_M
    max_children: int | None = None

    def __post_init__(self) -> None:
        between(0.0, math.inf, self, "temperature")
        limits = [name for name in ("d_max", "max_children") if getattr(self, name) is not None]
        at_least(1, self, "top_m", *limits)
        name = type(self).__name__
        if self.reading not in READINGS:
            raise ConfigError(f"{name}: reading must be one of {', '.join(READINGS)}, got {self.reading!r}")
        if self.sampled and self.reading == "joint":
            raise ConfigError(f"{name}: reading 'joint' looks at the token drawn; sampled trees need 'reach'")

    @property
    def drafting(self) -> Drafting:
        """For `compatible`: whether a sampling is made is decided before it, from the siblings before among others."""
        return Drafting(Draw.WITHOUT_REPLACEMENT if self.sampled else Draw.TOP_K, Pruning.BEFORE_DRAW)

    def finish(self, tree: TokenTree) -> Tensor:
        return tree.alive

    def chance(self, growth: Growth) -> Chance | None:
        """Where draws come from; None if nothing is drawn. Raises ConfigError where a generator is missing."""
        if not self.sampled:
            return None
        if growth.generator is None:
            raise ConfigError(f"{type(self).__name__}(sampled=True) draws tokens: give grow_tree a generator")
        return Sampler(growth.generator)

    def ask(self, distributions: Distributions) -> Known:
        """The distributions of the frontier, all tokens of them or as many as a node may have children."""
        if self.max_children is not None and not self.sampled and self.temperature == 1:
            stats = distributions.stats(self.top_m, self.max_children)
            return Known(stats.token_ids, stats.log_probs.double().exp(), SiblingStats.of(stats))
        probs = probabilities(distributions.logits().double(), self.temperature)
        stats = LogitDistributions(probs.log()).stats(self.top_m, 1)
        return Known(torch.arange(probs.shape[-1]).expand_as(probs), probs, SiblingStats.of(stats))

    def deepest(self, depth: int) -> bool:
        """Whether nodes of this depth have no children."""
        return self.d_max is not None and depth >= self.d_max

    def value(self, position: Position) -> float:
        """Of the next sampling; before the distribution is known, the most that it can be. 0 if no token is left."""
        if position.left is None:
            return position.reach
        if position.taken == self.max_children:
            return 0.0
        largest = float(position.left.max())
        return position.reach * largest if self.reading == "joint" or not largest else position.reach

    def take(self, position: Position, chance: Chance | None) -> tuple[Node, float]:
        """The next sibling (lines 6-11 of algorithm 1, with the token sampled before it is added), and v of its child.

        There is no sampling where no token is left: its value is 0 then.
        """
        assert position.tokens is not None and position.probs is not None and position.left is not None
        assert position.shared is not None
        value, left = self.value(position), position.left
        # argmax does not promise the first of several equal tokens
        at = int((left == left.max()).nonzero()[0]) if chance is None else chance.draw(left)
        log_prob, accepted = float(position.probs[at].log()), float(left[at])
        child_reach = position.reach * accepted
        node = Node(
            token_ids=int(position.tokens[at]),
            parent_ids=position.column,
            depths=position.depth + 1,
            log_probs=log_prob,
            path=extend_path(position.path, log_prob, position.shared.entropy),
            shared=position.shared,
            rank=position.taken,
            scores=value,
        )
        position.reach *= 1 - accepted
        rest = left.clone()
        rest[at] = 0
        total = float(rest.sum()) + position.beyond
        if total > 0:
            rest, position.beyond = rest / total, position.beyond / total
        position.left = rest
        position.taken += 1
        return node, child_reach

    def below(self, node: Node, column: int, reach: float) -> Position:
        """The position below a new node."""
        return Position(column, node.depths, node.path, reach)


@dataclass
class Heap:
    """One tree on its way: positions by value, how many nodes there are, and the position to draft from next."""

    entries: list[tuple[float, int, Position]]
    size: int = 0
    waiting: Position | None = None


@dataclass(frozen=True, kw_only=True)
class DySpecGreedy(DySpec):
    """DySpec's algorithm 1: the max_nodes samplings of the highest value, one after the other.

    The paper drafts from every node that it adds; here a node is drafted from when its turn comes, which gives the same
    tree and spares the leaves' passes.
    """

    max_nodes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "max_nodes")

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        known = self.ask(distributions)
        chance = self.chance(growth)
        if growth.memory is None:
            growth.memory = [Heap([], waiting=Position(ROOT, 0, AT_ROOT, 1.0)) for _ in range(growth.batch)]
        first = growth.tree.nodes
        return _block([self._advance(heap, known, row, chance, first) for row, heap in enumerate(growth.memory)])

    def _advance(self, heap: Heap, known: Known, row: int, chance: Chance | None, first: int) -> list[Node]:
        """Add nodes until the tree is full or the best position has to be drafted from first."""
        if heap.waiting is None:
            return []
        known.fill(heap.waiting, row, 0)
        self._push(heap, heap.waiting)
        heap.waiting = None
        nodes: list[Node] = []
        while heap.entries and heap.size < self.max_nodes:
            position = heapq.heappop(heap.entries)[-1]
            if position.left is None:
                heap.waiting = position
                return nodes
            node, child_reach = self.take(position, chance)
            column = first + len(nodes)
            nodes.append(node)
            heap.size += 1
            self._push(heap, position)
            if not self.deepest(node.depths):
                self._push(heap, self.below(node, column, child_reach))
        return nodes

    def _push(self, heap: Heap, position: Position) -> None:
        value = self.value(position)
        if value > 0:
            # of equal values the position that belongs to the earlier node comes first
            heapq.heappush(heap.entries, (-value, position.column, position))

    def expand(self, growth: Growth) -> Tensor:
        columns = [ROOT if heap.waiting is None else heap.waiting.column for heap in growth.memory]
        return torch.tensor(columns, dtype=torch.int64)[:, None]


@dataclass(frozen=True, kw_only=True)
class DySpecThreshold(DySpec):
    """DySpec's algorithm 2: every sampling of at least the threshold, layer by layer; the printed loop keeps those
    below it.

    threshold: in (0, 1], about 1 / n for trees of about n nodes (the paper: .001 at 768). max_nodes: the tree is cut
    off there, in the order of its columns; None is no limit, as printed.
    A node whose own first sampling is below the threshold is not drafted from.
    """

    threshold: float
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0.0, 1.0, self, "threshold")
        if self.threshold == 0:
            raise ConfigError(f"{type(self).__name__}: threshold must be above 0, or the tree never ends")
        if self.max_nodes is not None:
            at_least(1, self, "max_nodes")

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        known = self.ask(distributions)
        chance = self.chance(growth)
        if growth.memory is None:
            growth.memory = [{ROOT: Position(ROOT, 0, AT_ROOT, 1.0)} for _ in range(growth.batch)]
        sizes = growth.tree.sizes().tolist()
        blocks = []
        for row, positions in enumerate(growth.memory):
            nodes: list[Node] = []
            growth.memory[row] = {}
            for branch, column in enumerate(growth.frontier[row].tolist()):
                if not growth.frontier_alive[row, branch]:
                    continue
                known.fill(positions[column], row, branch)
                room = math.inf if self.max_nodes is None else self.max_nodes - sizes[row]
                self._layer(positions[column], nodes, growth.memory[row], growth.tree.nodes, room, chance)
            blocks.append(nodes)
        return _block(blocks)

    def _layer(
        self,
        position: Position,
        nodes: list[Node],
        below: dict[int, Position],
        first: int,
        room: float,
        chance: Chance | None,
    ) -> None:
        """Add the siblings of one position to the layer's nodes, and their positions to `below`."""
        while self.value(position) >= self.threshold and len(nodes) < room:
            node, child_reach = self.take(position, chance)
            column = first + len(nodes)
            nodes.append(node)
            if child_reach >= self.threshold and not self.deepest(node.depths):
                below[column] = self.below(node, column, child_reach)

    def expand(self, growth: Growth) -> Tensor:
        full = torch.zeros(growth.batch, dtype=torch.bool)
        if self.max_nodes is not None:
            full = growth.tree.sizes() >= self.max_nodes
        mask = torch.zeros_like(growth.newest.alive)
        for row, positions in enumerate(growth.memory):
            for column in positions:
                mask[row, column - growth.first] = not full[row]
        return newest_columns(growth, mask)


def _block(rows: list[list[Node]]) -> TokenTree:
    """One row of new nodes per tree, padded on the right."""
    width = max(len(nodes) for nodes in rows)
    nothing = SiblingStats(*[0.0] * len(SiblingStats._fields))
    dead = Node(0, ROOT, 0, 0.0, AT_ROOT, nothing, 0, 0.0).columns()
    filled = [[*(node.columns() for node in nodes), *[dead] * (width - len(nodes))] for nodes in rows]
    columns = {
        name: torch.tensor([[node[name] for node in nodes] for nodes in filled], dtype=DTYPES[name]).view(
            len(rows), width
        )
        for name in dead
    }
    counts = torch.tensor([len(nodes) for nodes in rows])
    return TokenTree(**columns, alive=torch.arange(width) < counts[:, None])
