"""DySpec appendix C: blocks of the tree attention mask that node orders leave to compute (table 5, figures 6 to 9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.papers import blocks
from benchmarks.papers.experiment import Bench, Experiment, Findings, Row
from benchmarks.papers.ordering import ORDERS, PAPER_BLOCK, attention_blocks, reorder
from c2t_plugin.traces.forest import Forest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS, QUICK_SEEDS = 20, 2
# One recorded tree of every `EVERY`, so that they come from different texts.
TREES, QUICK_TREES, EVERY = 40, 2, 125
DRAFT = "draft"
MASK_NODES = 256
NEAREST = "uniform attachment"
FIGURES = ("what", "paper", "ours", "low", "high", "std", "order", "nodes", "trees")


def table_5(bench: Bench) -> Findings:
    rows = blocks.table5_rows(QUICK_SEEDS if bench.quick else SEEDS)
    by_order = {order: blocks.distances(rows, order) for order in ("depth-first", "heavy-path")}
    nearest = {order: next(iter(found)) for order, found in by_order.items()}
    parts = [
        f"if the paper's reordering is {order}, the nearest generator is {name} ({by_order[order][name]:.1%} off)"
        for order, name in nearest.items()
    ]
    remark = f"On average over the eight figures, {'; '.join(parts)}."
    return Findings(rows, remark, table_5_figure(rows))


def table_5_figure(rows: Sequence[blocks.Row]) -> Figure:
    """Blocks over nodes of one generator's trees, beside the paper's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for order in ORDERS:
        chosen = [row for row in rows if row["generator"] == NEAREST and row["order"] == order]
        axes.plot([row["nodes"] for row in chosen], [row["ours"] for row in chosen], label=f"{order} order")
    for column, label in enumerate(("DySpec, not reordered", "DySpec, reordered")):
        axes.scatter(list(blocks.TABLE_5), [pair[column] for pair in blocks.TABLE_5.values()], label=label, zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(f"nodes ({NEAREST})")
    axes.set_ylabel(f"non-zero blocks of {PAPER_BLOCK} x {PAPER_BLOCK}")
    axes.legend()
    return figure


def recorded(bench: Bench) -> Forest:
    """A few recorded trees, far apart from each other."""
    forest = bench.traces(DRAFT).tree
    count = QUICK_TREES if bench.quick else TREES
    step = max(1, min(EVERY, len(forest) // count))
    return forest[torch.arange(0, len(forest), step)[:count]]


def figure_9(bench: Bench) -> Findings:
    rows = blocks.recorded_rows(recorded(bench))
    saved = {f"{row['drafted']}, {row['nodes']:.0f} nodes": 1 - best / first for row, first, best in _saved(rows)}
    paper = {nodes: 1 - after / before for nodes, (before, after) in blocks.FIGURE_9.items()}
    remark = (
        "Blocks saved by depth-first order: "
        + ", ".join(f"{share:.0%} ({name})" for name, share in saved.items())
        + "; the paper's: "
        + ", ".join(f"{share:.0%} ({nodes} nodes)" for nodes, share in paper.items())
        + f". Trees of the stand-alone draft, its most probable nodes; prefixes of {blocks.FIGURE_9_PREFIXES[0]} to "
        f"{blocks.FIGURE_9_PREFIXES[-1]} tokens."
    )
    return Findings(rows, remark, figure_9_bars(rows))


def figure_9_bars(rows: Sequence[blocks.Row]) -> Figure:
    """Blocks in every node order, the paper's beside ours, one panel per size of trees."""
    from c2t_plugin.lab.pictures import bars_figure

    drawn: dict[str, dict[str, dict[str, float | None]]] = {}
    for row in rows:
        panel = drawn.setdefault(f"trees of {row['nodes']:.0f} nodes", {})
        panel[f"{row['drafted']},\n{row['order']} order"] = {"ours": row["ours"], "paper": row["paper"]}
    return bars_figure(drawn, f"non-zero blocks of {PAPER_BLOCK} x {PAPER_BLOCK}")


def _saved(rows: Sequence[blocks.Row]) -> list[tuple[blocks.Row, float, float]]:
    """Per sort of trees one row, its blocks in the order of drafting and depth-first."""
    found = []
    for row in rows:
        if row["order"] == "insertion":
            same = [other for other in rows if (other["nodes"], other["drafted"]) == (row["nodes"], row["drafted"])]
            found.append((row, row["ours"], next(each["ours"] for each in same if each["order"] == "depth-first")))
    return found


def figure_7(bench: Bench) -> Findings:
    forest = recorded(bench)
    nodes = min(MASK_NODES, forest.joint_log_prob.shape[1])
    trees = blocks.recorded_trees(forest, nodes, greedy=True)
    rows: list[Row] = []
    for name, place in ORDERS.items():
        counts = torch.tensor([attention_blocks(tree, place(tree)) for tree in trees], dtype=torch.float64)
        entries = torch.tensor([float(mask(tree).sum()) for tree in trees])
        rows.append(
            {
                "order": name,
                "nodes": nodes,
                "trees": len(trees),
                "non-zero blocks": float(counts.mean()),
                "entries per block": float((entries / counts).mean()),
            }
        )
    drawn = [row["order"] for row in sorted(rows, key=lambda row: float(row["non-zero blocks"] or 0))]
    remark = f"Fewest blocks: {drawn[0]}; most: {drawn[-1]}. No prefix, the root not counted."
    return Findings(rows, remark, figure_7_masks(trees[0]))


def mask(parent_ids: Tensor) -> Tensor:
    """(nodes, nodes) bool: [i, j] where j is i or an ancestor of i."""
    found = torch.zeros(len(parent_ids), len(parent_ids), dtype=torch.bool)
    for node, parent in enumerate(parent_ids.tolist()):
        if parent >= 0:
            found[node] = found[parent]
        found[node, node] = True
    return found


def figure_7_masks(parent_ids: Tensor) -> Figure:
    """One tree's attention mask in every order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(ORDERS), 4), layout="constrained")
    for axes, (name, place) in zip(figure.subplots(1, len(ORDERS)), ORDERS.items(), strict=True):
        axes.imshow(mask(reorder(parent_ids, place(parent_ids))).numpy(), cmap="Greys", interpolation="nearest")
        axes.set_title(f"{name} order")
        axes.set_xticks(range(0, len(parent_ids), PAPER_BLOCK))
        axes.set_yticks(range(0, len(parent_ids), PAPER_BLOCK))
        axes.tick_params(labelbottom=False, labelleft=False)
        axes.grid(linewidth=0.3)
    return figure


EXPERIMENTS = (
    Experiment(
        name="dyspec-table-5",
        title="Non-zero attention blocks of random trees, by generator and node order",
        source="DySpec table 5 (block 32, no prefix); the generator is not given",
        columns=("generator", *FIGURES),
        run=table_5,
    ),
    Experiment(
        name="dyspec-figure-7",
        title="Attention masks of drafted trees in three node orders",
        source="DySpec figures 6 and 7",
        columns=("order", "nodes", "trees", "non-zero blocks", "entries per block"),
        run=figure_7,
    ),
    Experiment(
        name="dyspec-figure-9",
        title="Non-zero attention blocks of drafted trees behind a prefix",
        source="DySpec figure 9 (block 32)",
        columns=("drafted", *FIGURES),
        run=figure_9,
    ),
)
