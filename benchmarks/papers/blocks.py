"""Non-zero attention blocks of random and of recorded draft trees: DySpec's table 5 and figure 9.

The paper does not say how it drew its "random tree structure". Of the generators below, uniform attachment with the
root counted is the only one that its figures do not rule out, and its "reorder" is then plain depth-first order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.papers.ordering import ORDERS, PAPER_BLOCK, attention_blocks
from c2t_plugin.errors import C2TError
from c2t_plugin.traces.forest import Forest

Row = dict[str, Any]
Draw = Callable[[int, np.random.Generator], list[int]]

# DySpec table 5: nodes -> blocks without and with reordering
TABLE_5 = {256: (36.0, 22.5), 512: (135.5, 52.8), 1024: (490.2, 119.3), 2048: (1654.5, 278.7)}
# DySpec C.1, of figure 9: nodes -> the same two, prefix included
FIGURE_9 = {768: (366.12, 218.31), 1024: (580.07, 295.59)}
# prompt of 128 tokens, then 128 generated ones (DySpec 5.1); every eighth length
FIGURE_9_PREFIXES = tuple(range(128, 256, 8))


def uniform_attachment(nodes: int, rng: np.random.Generator) -> list[int]:
    """Random recursive tree: node 0 is the root, each later node hangs below any earlier one with equal probability."""
    return [-1, *(int(rng.integers(node)) for node in range(1, nodes))]


def uniform_attachment_rootless(nodes: int, rng: np.random.Generator) -> list[int]:
    """The same, but the root is not one of the counted nodes."""
    return [int(rng.integers(-1, node)) for node in range(nodes)]


def preferential_attachment(nodes: int, rng: np.random.Generator) -> list[int]:
    """A node gets its next child with probability in proportion to its edges."""
    parents, ends = [-1], [0]
    for node in range(1, nodes):
        parents.append(ends[rng.integers(len(ends))])
        ends += [parents[-1], node]
    return parents


def binary_search_tree(nodes: int, rng: np.random.Generator) -> list[int]:
    """At most two children; each free place is as likely as any other."""
    parents, places = [-1], [0, 0]
    for node in range(1, nodes):
        parents.append(places.pop(int(rng.integers(len(places)))))
        places += [node, node]
    return parents


def galton_watson(nodes: int, rng: np.random.Generator) -> list[int]:
    """Breadth-first, a Poisson number of children with mean 2 for every node; drawn again when it dies out."""
    while True:
        parents = [-1]
        for node, children in enumerate(rng.poisson(2.0, nodes)):
            if node < len(parents) < nodes:
                parents += [node] * int(children)
        if len(parents) >= nodes:
            return parents[:nodes]


def conditioned_galton_watson(nodes: int, rng: np.random.Generator) -> list[int]:
    """Breadth-first, a Poisson number of children given their sum: the shape of a uniform labelled tree."""
    children = rng.multinomial(nodes - 1, np.full(nodes, 1.0 / nodes))
    # cycle lemma: one rotation of the counts is a tree
    start = int(np.argmin(np.cumsum(children - 1))) + 1
    counts = np.roll(children, -start)
    return [-1, *np.repeat(np.arange(nodes), counts).tolist()]


def layered(nodes: int, rng: np.random.Generator) -> list[int]:
    """Layers of 32 nodes, each below any node of the layer before with equal probability."""
    parents: list[int] = [-1]
    before = [0]
    while len(parents) < nodes:
        width = min(32, nodes - len(parents))
        layer = list(range(len(parents), len(parents) + width))
        parents += sorted(before[choice] for choice in rng.integers(len(before), size=width))
        before = layer
    return parents


def dyspec_on_random_distributions(nodes: int, rng: np.random.Generator) -> list[int]:
    """DySpec algorithm 1 with every draft distribution drawn from a Dirichlet: concentration .02, 64 tokens."""

    def distribution() -> np.ndarray:
        return rng.dirichlet(np.full(64, 0.02))

    parents: list[int] = [-1]
    heap = [(-1.0, 0, 0, distribution())]
    pushed = 1
    while len(parents) < nodes:
        value, _, parent, residual = heapq.heappop(heap)
        token = int(rng.choice(len(residual), p=residual))
        chance = float(residual[token])
        parents.append(parent)
        left = residual.copy()
        left[token] = 0.0
        if left.sum() > 0.0:
            heapq.heappush(heap, (value * (1.0 - chance), pushed, parent, left / left.sum()))
        heapq.heappush(heap, (value * chance, pushed + 1, len(parents) - 1, distribution()))
        pushed += 2
    return parents


GENERATORS: dict[str, Draw] = {
    "uniform attachment": uniform_attachment,
    "uniform attachment, root not counted": uniform_attachment_rootless,
    "preferential attachment": preferential_attachment,
    "binary search tree": binary_search_tree,
    "Galton-Watson, mean 2": galton_watson,
    "uniform labelled tree": conditioned_galton_watson,
    "layers of 32": layered,
    "DySpec on random distributions": dyspec_on_random_distributions,
}


def table5_rows(seeds: int = 20, generators: Sequence[str] = tuple(GENERATORS)) -> list[Row]:
    """DySpec table 5's block counts, for every generator, size and order.

    seeds: trees per generator and size, at least 2. Rows: what, paper, ours (mean), low and high (95% interval of the
    mean), std (of one tree), order, generator, nodes, trees. The paper's reordered figure stands beside both the
    depth-first and the heavy-path order.
    """
    rows = []
    for name in generators:
        for nodes, paper in TABLE_5.items():
            trees = [
                torch.tensor(GENERATORS[name](nodes, np.random.default_rng([seed, nodes]))) for seed in range(seeds)
            ]
            for order, place in ORDERS.items():
                counts = [attention_blocks(tree, place(tree)) for tree in trees]
                what = f"DySpec table 5, {nodes} nodes, {order} order"
                extra = {"order": order, "generator": name, "nodes": nodes, "trees": seeds}
                rows.append({"what": what, "paper": paper[order != "insertion"], **_summary(counts), **extra})
    return rows


def distances(rows: Iterable[Row], reordered: str = "depth-first") -> dict[str, float]:
    """How far each generator of table5_rows is from the paper, nearest first.

    reordered: the order that the paper's reordered figures are taken for. The distance is the mean over the eight
    figures of |ln(ours / paper)|.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["order"] in ("insertion", reordered):
            found.setdefault(row["generator"], []).append(abs(math.log(row["ours"] / row["paper"])))
    return dict(sorted(((name, float(np.mean(parts))) for name, parts in found.items()), key=lambda item: item[1]))


def recorded_trees(forest: Forest, nodes: int, greedy: bool) -> list[Tensor]:
    """The `nodes` most probable nodes of every recorded tree, as parent_ids in the order of drafting.

    greedy: by falling joint probability, as DySpec's heap adds them (D.1's reading); else layer by layer, as its
    algorithm 2 does. Raises C2TError if the trees are smaller.
    """
    total = forest.joint_log_prob.shape[1]
    if not 1 <= nodes <= total:
        raise C2TError(f"recorded trees have {total} nodes, {nodes} are asked for")
    parents = forest.parent_ids.long().repeat_interleave(forest.k, dim=1)
    # stable: of equals the earlier column comes first, so a parent before its children
    best = forest.joint_log_prob.argsort(dim=1, descending=True, stable=True)[:, :nodes]
    order = best if greedy else best.sort(dim=1).values
    place = torch.full((len(forest), total + 1), -1)
    # the last column is what parent -1 reads
    place.scatter_(1, order, torch.arange(nodes).expand(len(forest), nodes))
    return list(place.gather(1, parents.gather(1, order) % (total + 1)))


def figure9_rows(
    trees: Sequence[Tensor],
    drafted: str,
    paper_nodes: int,
    prefixes: Sequence[int] = FIGURE_9_PREFIXES,
    block: int = PAPER_BLOCK,
) -> list[Row]:
    """DySpec figure 9: blocks of real trees behind a prefix, mean over trees and prefix lengths.

    trees: parent_ids in the order of drafting. drafted: what the rows say of that order. paper_nodes: 768 or 1024, the
    paper's trees to stand beside. Rows: as table5_rows', `drafted` instead of `generator`; the interval is over trees.
    """
    rows = []
    for order, place in ORDERS.items():
        placed = [(tree, place(tree)) for tree in trees]
        counts = [float(np.mean([attention_blocks(*pair, block, prefix) for prefix in prefixes])) for pair in placed]
        nodes = round(float(np.mean([len(tree) for tree in trees])), 1)
        extra = {"order": order, "drafted": drafted, "nodes": nodes, "trees": len(trees)}
        what = f"DySpec figure 9, {paper_nodes} nodes, {order} order"
        rows.append({"what": what, "paper": FIGURE_9[paper_nodes][order != "insertion"], **_summary(counts), **extra})
    return rows


def recorded_rows(forest: Forest, paper_nodes: Sequence[int] = tuple(FIGURE_9)) -> list[Row]:
    """figure9_rows of recorded trees, drafted greedily and layer by layer; at most as many nodes as they have."""
    rows = []
    for wanted in paper_nodes:
        nodes = min(wanted, forest.joint_log_prob.shape[1])
        for greedy, drafted in ((True, "greedily"), (False, "layer by layer")):
            rows += figure9_rows(recorded_trees(forest, nodes, greedy), drafted, wanted)
    return rows


def _summary(counts: Sequence[float]) -> Row:
    """Mean, its 95% interval (normal approximation) and the standard deviation of one tree."""
    if len(counts) < 2:
        raise C2TError(f"an interval needs at least 2 trees, got {len(counts)}")
    mean, std = float(np.mean(counts)), float(np.std(counts, ddof=1))
    half = 1.96 * std / math.sqrt(len(counts))
    figures = {"ours": mean, "low": mean - half, "high": mean + half, "std": std}
    return {name: round(figure, 2) for name, figure in figures.items()}
