"""C2T v2's tables that v1 has not: 1 (acceptance by depth), 2 (without an engine), 5 (scores by entropy)."""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_plugin.lab.curves import truncate
from c2t_plugin.lab.reproduce.c2t_v1_common import TITLES
from c2t_plugin.lab.reproduce.experiment import Bench, Cell, Experiment, Findings, Row
from c2t_plugin.lab.trees import Forest
from c2t_plugin.tree import best

DEPTHS = (1, 2, 3)
# joint probability in (low, high] -> accepted share at depth 1, 2, 3
TABLE_1 = {(0.0, 0.05): (0.032, 0.007, 0.006), (0.5, 0.55): (0.473, 0.390, 0.320), (0.9, 0.95): (0.795, 0.701, 0.632)}
# EAGLE-2's own tree, whose candidates the paper counts
EAGLE2_N, EAGLE2_DEPTH = 60, 6


def candidates(forest: Forest, n: int) -> Tensor:
    """(trees, nodes) bool: the nodes that EAGLE-2 verifies, the root being one of its n."""
    return best(forest.joint_log_prob, torch.ones_like(forest.accepted), n - 1)


def accepted_by_depth(forest: Forest, verified: Tensor, low: float, high: float) -> dict[int, tuple[int, int]]:
    """depth -> nodes and accepted ones of those verified, of joint probability in (low, high]."""
    prob = forest.joint_log_prob.exp()
    inside = verified & (prob > low) & (prob <= high)
    found = {}
    for depth in DEPTHS:
        nodes = inside & (forest.depth == depth)
        found[depth] = int(nodes.sum()), int((nodes & forest.accepted).sum())
    return found


def table_1(bench: Bench) -> Findings:
    rows: list[Row] = []
    falling = 0
    for draft, title in TITLES.items():
        tree = bench.traces(draft).tree
        forest = truncate(tree, min(EAGLE2_DEPTH, tree.layers))
        verified = candidates(forest, min(EAGLE2_N, forest.accepted.shape[1] + 1))
        for (low, high), paper in TABLE_1.items():
            counts = accepted_by_depth(forest, verified, low, high)
            shares = [hits / nodes if nodes else None for nodes, hits in counts.values()]
            known = [share for share in shares if share is not None]
            falling += known == sorted(known, reverse=True)
            cells: dict[str, Cell] = {f"paper d={depth}": share for depth, share in zip(DEPTHS, paper, strict=True)}
            cells |= {f"d={depth}": share for depth, share in zip(DEPTHS, shares, strict=True)}
            cells |= {f"nodes d={depth}": counts[depth][0] for depth in DEPTHS}
            rows.append({"draft": title, "joint probability": f"({low:g}, {high:g}]", **cells})
    return Findings(
        rows,
        f"Nodes that EAGLE-2 verifies (N = {EAGLE2_N}, d_max = {EAGLE2_DEPTH}). In {falling} of {len(rows)} rows the "
        "accepted share falls with depth, as in all three of the paper.",
    )


EXPERIMENTS = (
    Experiment(
        name="c2t-v2-table-1",
        title="Accepted share at equal joint probability, by depth",
        source="C2T v2 table 1",
        columns=(
            "draft",
            "joint probability",
            *(f"paper d={depth}" for depth in DEPTHS),
            *(f"d={depth}" for depth in DEPTHS),
            *(f"nodes d={depth}" for depth in DEPTHS),
        ),
        run=table_1,
    ),
)
