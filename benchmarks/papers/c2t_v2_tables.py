"""C2T v2's tables that v1 has not: 1 (acceptance by depth), 2 (without an engine), 5 (scores by entropy)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers import printed
from benchmarks.papers.c2t_v1_common import PAPER_RECIPE, TITLES, Brought
from benchmarks.papers.c2t_v1_pictures import ENTROPY_EDGES
from benchmarks.papers.experiment import Bench, Cell, Experiment, Findings, Row
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.policies.c2t import C2TTree
from c2t_plugin.lab.policies.eagle2 import Eagle2
from c2t_plugin.lab.sweeps import path_minimum, static_sweep, threshold_sweep, truncate
from c2t_plugin.traces.file import Traces
from c2t_plugin.traces.forest import Forest
from c2t_plugin.trees.nodes import best

DEPTHS = (1, 2, 3)
# joint probability in (low, high] -> accepted share at depth 1, 2, 3
TABLE_1 = {(0.0, 0.05): (0.032, 0.007, 0.006), (0.5, 0.55): (0.473, 0.390, 0.320), (0.9, 0.95): (0.795, 0.701, 0.632)}
# EAGLE-2's own tree, whose candidates the paper counts
EAGLE2_N, EAGLE2_DEPTH = 60, 6
SCORES = ("accuracy", "precision", "recall", "F1")


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
    for draft, title in common.titles(bench).items():
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


class Method(NamedTuple):
    """A method of table 2 and what stands for it. name: as in lab.printed. length: tokens of a chain, or depth of a
    tree of 60 nodes; C2T's is two more. taus, taus_c2t: printed means over three models and six corpora."""

    name: str
    draft: str
    length: int
    taus: tuple[float, ...]
    taus_c2t: tuple[float, ...]

    @property
    def paper_gamma(self) -> float:
        """C2T's candidates over the method's own, all models and corpora."""
        rows = [row for row in printed.V2_TABLE_2 if row.name.endswith(self.name)]
        return sum(sum(row.gamma_c2t) for row in rows) / sum(sum(row.gamma) for row in rows)

    @property
    def paper_tau(self) -> float:
        return sum(self.taus_c2t) / sum(self.taus)


# Vanilla speculative decoding's draft length is not printed; 6 and 8 layers are EAGLE-2's and 3's in their own code.
TABLE_2 = (
    Method(
        "SD",
        "draft",
        5,
        (3.69, 4.21, 3.71, 3.78, 3.20, 3.19, 3.27, 3.66, 4.09, 3.27, 2.95, 2.88, 3.72, 4.26, 3.82, 3.72, 3.15, 2.87),
        (4.06, 4.86, 4.13, 4.26, 3.43, 3.45, 3.56, 4.05, 4.68, 3.56, 3.13, 3.03, 4.11, 4.87, 4.26, 4.11, 3.43, 3.15),
    ),
    Method(
        "E2",
        "eagle1",
        6,
        (4.04, 4.69, 4.25, 4.13, 3.45, 3.60, 3.81, 4.29, 4.40, 3.77, 3.33, 3.77, 3.19, 4.44, 3.53, 3.19, 3.51, 2.77),
        (4.08, 4.78, 4.25, 4.21, 3.52, 3.65, 3.92, 4.55, 4.73, 3.92, 3.49, 3.81, 3.29, 4.59, 3.62, 3.29, 3.95, 2.83),
    ),
    Method(
        "E3",
        "eagle3",
        8,
        (6.19, 6.74, 6.23, 6.72, 5.38, 5.23, 5.73, 6.55, 7.04, 5.59, 5.01, 4.99, 6.25, 6.59, 6.14, 6.25, 5.01, 4.75),
        (6.34, 7.06, 6.46, 7.01, 5.46, 5.28, 5.93, 6.87, 7.49, 5.66, 5.07, 5.04, 6.64, 6.91, 6.39, 6.64, 5.12, 4.84),
    ),
)
PAPER_BETA = 0.5
DEEPER = 2


def _chains(traces: Traces, method: Method, classifier: NodeClassifier) -> tuple[Brought, Callable[[float], Brought]]:
    base = common.at_setting(traces, static_sweep(traces.chain), min(method.length, traces.chain.layers) - 1)
    chain = truncate(traces.chain, min(method.length + DEEPER, traces.chain.layers))
    confidence = classifier.confidence(chain.stats())

    def at(beta: float) -> Brought:
        return common.at_setting(traces, threshold_sweep(chain, confidence, torch.tensor([beta])))

    return base, at


def _trees(traces: Traces, method: Method, classifier: NodeClassifier) -> tuple[Brought, Callable[[float], Brought]]:
    k, deepest = min(common.K, traces.tree.k), traces.tree.layers

    def at(beta: float) -> Brought:
        depth = min(method.length + DEEPER, deepest)
        return common.served(traces, C2TTree(classifier=classifier, beta=beta, first_k=k, second_k=k, d_max=depth))

    eagle2 = Eagle2(max_nodes=EAGLE2_N - 1, k=k, d_max=min(method.length, deepest), top_m=traces.header["top_m"])
    return common.served(traces, eagle2), at


def table_2(bench: Bench) -> Findings:
    rows: list[Row] = []
    for method in TABLE_2:
        traces = common.held_out(bench, method.draft)
        kind = _chains if method.name == "SD" else _trees
        fitted, _ = common.small_fit(common.training(bench, method.draft), PAPER_RECIPE, bench.seed)
        base, at = kind(traces, method, fitted)
        rows.append(_table_2_row(method, method.name, None, base, base, paper=False))
        rows.append(_table_2_row(method, f"{method.name} + C, paper's recipe", PAPER_BETA, at(PAPER_BETA), base))
        _, at = kind(traces, method, common.paper_features(bench, method.draft))
        beta, found = common.beta_at(at, base.tau)
        rows.append(_table_2_row(method, f"{method.name} + C, equal tau", beta, found, base))
    shares = [row["gamma / without"] for row in rows if str(row["method"]).endswith("equal tau")]
    known = [float(share) for share in shares if share is not None]
    return Findings(
        rows,
        f"The paper's means over three models and six corpora, tau as printed. C2T is {DEEPER} deeper than what it is "
        "combined with and has K = 10 for both top-K; gamma is per output token, the speeds are left out. At equal tau "
        f"C2T needs {common.listed(known)} of the candidates. Chains of {TABLE_2[0].length} stand for the paper's SD, "
        f"whose length is not printed. {common.FITTED}",
    )


def _table_2_row(
    method: Method, name: str, beta: float | None, found: Brought, base: Brought, paper: bool = True
) -> Row:
    return {
        "draft": TITLES[method.draft],
        "method": name,
        "beta": beta,
        "paper tau / without": method.paper_tau if paper else 1.0,
        "paper gamma / without": method.paper_gamma if paper else 1.0,
        "tau": found.tau,
        "gamma": found.gamma,
        "tau / without": common.ratio(found.tau, base.tau),
        "gamma / without": common.ratio(found.per_token, base.per_token),
        "missing": found.missing,
    }


# trees of 511 nodes with the root, to which the paper's figures belong (docs/fidelity.md)
TABLE_5_LAYERS = 6


@dataclass(frozen=True)
class Scores:
    """Of nodes called positive where they are kept; None where a share has no denominator."""

    accuracy: float | None
    precision: float | None
    recall: float | None

    @classmethod
    def of(cls, kept: Tensor, accepted: Tensor) -> Scores:
        """kept, accepted: (nodes,) bool."""
        hits, right = int((kept & accepted).sum()), int((kept == accepted).sum())
        return cls(
            common.ratio(right, len(kept)), common.ratio(hits, int(kept.sum())), common.ratio(hits, int(accepted.sum()))
        )

    @property
    def f1(self) -> float | None:
        if not self.precision or not self.recall:
            return None
        return 2 * self.precision * self.recall / (self.precision + self.recall)


def kept_at_recall(forest: Forest, confidence: Tensor, recall: float) -> Tensor:
    """(trees, nodes) bool: a threshold's nodes, ancestors kept too, that hold this share of the accepted ones."""
    lowest = path_minimum(forest, confidence)
    ordered = lowest[forest.accepted].sort(descending=True).values
    return lowest >= ordered[max(1, math.ceil(recall * len(ordered) - 1e-9)) - 1]


def table_5(bench: Bench) -> Findings:
    rows: list[Row] = []
    for draft in ("eagle3", "draft"):
        traces = common.held_out(bench, draft)
        forest = truncate(traces.tree, min(TABLE_5_LAYERS, traces.tree.layers))
        eagle2 = candidates(forest, EAGLE2_N)
        recall = Scores.of(eagle2.flatten(), forest.accepted.flatten()).recall
        c2t = kept_at_recall(forest, common.confidence(common.paper_features(bench, draft), forest), recall or 1.0)
        rows += _table_5_rows(TITLES[draft], forest, {"E2": eagle2, "C2T": c2t})
    totals = "; ".join(
        f"{row['draft']} {row['E2 precision']:.3f} and {row['C2T precision']:.3f}"
        for row in rows
        if row["entropy"] == "Total"
    )
    return Findings(
        rows,
        f"EAGLE-2's best {EAGLE2_N}, root included, and C2T where it recalls as many accepted nodes in all; nodes of "
        f"{TABLE_5_LAYERS} layers. Precision of EAGLE-2 and of C2T: {totals}. {common.SAMPLED}",
    )


def _table_5_rows(title: str, forest: Forest, kept: dict[str, Tensor]) -> list[Row]:
    entropy = forest.stats().entropy
    place = torch.bucketize(entropy.contiguous(), torch.tensor(ENTROPY_EDGES[1:]), right=True)
    rows: list[Row] = []
    for at, (interval, paper) in enumerate(printed.V2_TABLE_5.items()):
        inside = place == at if interval != "Total" else torch.ones_like(place, dtype=torch.bool)
        row: dict[str, Cell] = {"draft": title, "entropy": interval, "nodes": float(inside.float().mean())}
        for name, (accuracy, precision, recall) in zip(kept, paper, strict=True):
            found = Scores.of(kept[name][inside], forest.accepted[inside])
            theirs = (accuracy, precision, recall, 2 * precision * recall / (precision + recall))
            ours = (found.accuracy, found.precision, found.recall, found.f1)
            for score, one, other in zip(SCORES, theirs, ours, strict=True):
                row[f"paper {name} {score}"] = one
                row[f"{name} {score}"] = other
        rows.append(row)
    return rows


EXPERIMENTS = (
    Experiment(
        name="c2t-v2-table-1",
        title="Accepted share at equal joint probability, by depth",
        source="C2T v2 table 1",
        columns=(
            "draft",
            "joint probability",
            *(f"{whose}d={depth}" for whose in ("paper ", "", "nodes ") for depth in DEPTHS),
        ),
        run=table_1,
    ),
    Experiment(
        name="c2t-v2-table-2",
        title="C2T on top of a static chain, EAGLE-2 and EAGLE-3, without an engine",
        source="C2T v2 table 2, candidates and accept length; our tau without bonus",
        columns=(
            "draft",
            "method",
            "beta",
            "paper tau / without",
            "paper gamma / without",
            "tau",
            "gamma",
            "tau / without",
            "gamma / without",
            "missing",
        ),
        run=table_2,
    ),
    Experiment(
        name="c2t-v2-table-5",
        title="Scores on nodes by entropy, EAGLE-2 and C2T",
        source="C2T v2 table 5",
        columns=(
            "draft",
            "entropy",
            "nodes",
            *(f"{whose}{name} {score}" for score in SCORES for name in ("E2", "C2T") for whose in ("paper ", "")),
        ),
        run=table_5,
    ),
)
