"""C2T's statistics of distributions and its curves: v1 figures 2 and 4, with v2's of the same things."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers.c2t_v1_common import TITLES, Curve, Ground
from benchmarks.papers.experiment import Bench, Cell, Experiment, Findings, Row
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.policies.c2t import C2TTree
from c2t_plugin.traces.forest import Forest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Entropy in nats, lower ends; the last interval is open.
ENTROPY_EDGES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
INTERVALS = tuple(
    f"[{low:g}, {high:g})" for low, high in zip(ENTROPY_EDGES, (*ENTROPY_EDGES[1:], float("inf")), strict=True)
)


class ByRank(NamedTuple):
    """Per entropy interval and rank, (intervals, k) float64 each, NaN where there is no state; states: (intervals,)."""

    states: Tensor
    prob: Tensor
    accepted: Tensor


def by_entropy_and_rank(forest: Forest) -> ByRank:
    """Mean probability and share of accepted tokens of the roots' children: one forward, as the paper has it."""
    edges = torch.tensor(ENTROPY_EDGES[1:])
    place = torch.bucketize(forest.entropy[:, 0].contiguous(), edges, right=True)
    states = torch.bincount(place, minlength=len(ENTROPY_EDGES))
    sums = []
    for value in (forest.log_prob[:, : forest.k].exp(), forest.accepted[:, : forest.k]):
        total = torch.zeros(len(ENTROPY_EDGES), forest.k, dtype=torch.float64)
        sums.append(total.index_add_(0, place, value.double()) / states[:, None])
    return ByRank(states, *sums)


def figure_2(bench: Bench) -> Findings:
    rows: list[Row] = []
    found = {title: by_entropy_and_rank(bench.traces(draft).tree) for draft, title in common.titles(bench).items()}
    paper_signs = {INTERVALS[0]: "overestimated", INTERVALS[-1]: "underestimated"}
    for title, table in found.items():
        for at, interval in enumerate(INTERVALS):
            states = int(table.states[at])
            prob, accepted = (float(part[at, 0]) if states else None for part in (table.prob, table.accepted))
            rows.append(
                {
                    "draft": title,
                    "entropy": interval,
                    "states": states,
                    "paper first token": paper_signs.get(interval),
                    "probability": prob,
                    "accepted": accepted,
                    "bias": prob - accepted if prob is not None and accepted is not None else None,
                    "bias, ranks 2 on": float((table.prob - table.accepted)[at, 1:].mean()) if states else None,
                }
            )
    return Findings(rows, _figure_2_remark(rows), _heat_maps(found))


ENOUGH_STATES = 50


def _figure_2_remark(rows: list[Row]) -> str:
    said = []
    for title in dict.fromkeys(row["draft"] for row in rows):
        own = [
            row
            for row in rows
            if row["draft"] == title and isinstance(row["states"], int) and row["states"] >= ENOUGH_STATES
        ]
        if own:
            first, last = float(own[0]["bias"] or 0.0), float(own[-1]["bias"] or 0.0)
            said.append(f"{title} {first:+.3f} at {own[0]['entropy']}, {last:+.3f} at {own[-1]['entropy']}")
    return (
        "bias is probability minus accepted share of the most probable token (of the others: mean over ranks). Lowest "
        f"and highest interval of {ENOUGH_STATES} states or more: {'; '.join(said) or 'none'}."
    )


def _heat_maps(found: dict[str, ByRank]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 3, squeeze=False)
    for line, (title, table) in zip(axes, found.items(), strict=True):
        bias = (table.prob - table.accepted).numpy()
        top = float(np.nanmax(np.abs(bias)))
        # the paper smooths (a) and (b) "with a logarithm"; counts of 0 need the offset
        maps: tuple[tuple[str, np.ndarray, dict[str, Any]], ...] = (
            ("log mean probability", np.log(table.prob.numpy() + 1e-3), {"cmap": "viridis"}),
            ("log accepted share", np.log(table.accepted.numpy() + 1e-3), {"cmap": "viridis"}),
            ("probability - accepted", bias, {"cmap": "coolwarm", "vmin": -top, "vmax": top}),
        )
        for axis, (what, values, options) in zip(line, maps, strict=True):
            image = axis.imshow(values, aspect="auto", **options)
            axis.set(title=f"{title}: {what}", xlabel="rank, 0 the most probable", ylabel="entropy, nats")
            axis.set_yticks(range(len(INTERVALS)), INTERVALS)
            figure.colorbar(image, ax=axis)
    return figure


D_MAX = 10
# C2T v2 appendix F, an average over tau and six corpora
PAPER_MEAN = 0.75
SECOND_K = (5, 10)
# a replay through the growth loop each, so few of them
SECOND_K_BETAS = 8
# rule -> column of its gamma over EAGLE-2's
RATIOS = {
    "C2T, paper's recipe": "paper's recipe / EAGLE-2",
    "C2T": "C2T / EAGLE-2",
    "C2T, more features": "more features / EAGLE-2",
    **{f"C2T, second K = {k}": f"second K = {k} / EAGLE-2" for k in SECOND_K},
}


def figure_4(bench: Bench) -> Findings:
    rows: list[Row] = []
    pictures: dict[str, dict[str, Curve]] = {}
    for draft in ("eagle3", "draft"):
        ground = Ground.of(common.held_out(bench, draft), D_MAX)
        # on all prompts, as the paper's is
        fitted, _ = common.small_fit(bench.traces(draft, "train"), common.PAPER_RECIPE, bench.seed)
        classifier = common.paper_features(bench, draft)
        curves = {
            "EAGLE-2": ground.eagle2,
            "P": ground.threshold(ground.forest.joint_log_prob.exp()),
            "C2T, paper's recipe": ground.threshold(ground.confidence(fitted)),
            "C2T": ground.threshold(ground.confidence(classifier)),
            "C2T, more features": ground.threshold(ground.confidence(bench.classifier(draft))),
        }
        second = second_k_curves(ground, classifier, curves["C2T"])
        rows += _figure_4_rows(TITLES[draft], curves, second)
        pictures[TITLES[draft]] = curves | second
    means = "; ".join(_means(row) for row in rows if row["tau"] is None)
    return Findings(
        rows,
        "gamma per verification, interpolated between settings; a draft's last row is the mean over tau. Mean gamma "
        f"over EAGLE-2's (and over the threshold's on P): {means}. "
        "C2T is the shipped classifier of the paper's three features, more features the one shipped as the best. "
        f"Second top-K is replayed at {SECOND_K_BETAS} betas; where the record does not expand a node that it wants to "
        f"draft from, what is replayed is C2T without that node's children. {common.SAMPLED} The paper's recipe is "
        "fitted on all training prompts.",
        common.curves_figure(pictures),
    )


def _means(row: Row) -> str:
    shares = [f"{name} {row[name]:.3f}" for name in (*RATIOS.values(), "C2T / P") if row[name] is not None]
    return f"{row['draft']} {', '.join(shares)}"


def _figure_4_rows(title: str, curves: dict[str, Curve], second: dict[str, Curve]) -> list[Row]:
    reached = min(float(curve.tau.max()) for curve in curves.values())
    rows: list[Row] = []
    for tau in np.linspace(0.2, 0.9, 8) * reached:
        gamma = {name: curve.gamma_at(float(tau)) for name, curve in (curves | second).items()}
        row: dict[str, Cell] = {"draft": title, "tau": float(tau), "paper C2T / EAGLE-2": None}
        row |= {name: gamma[name] for name in curves}
        row |= {column: common.ratio(gamma[name], gamma["EAGLE-2"]) for name, column in RATIOS.items()}
        row["C2T / P"] = common.ratio(gamma["C2T"], gamma["P"])
        rows.append(row)
    last: dict[str, Cell] = {"draft": title, "tau": None, "paper C2T / EAGLE-2": PAPER_MEAN, **dict.fromkeys(curves)}
    last |= {name: common.mean([_number(row[name]) for row in rows]) for name in (*RATIOS.values(), "C2T / P")}
    return [*rows, last]


def _number(cell: Cell) -> float | None:
    return cell if isinstance(cell, float) else None


def second_k_curves(ground: Ground, classifier: NodeClassifier, curve: Curve) -> dict[str, Curve]:
    """C2T's trees with at most K nodes per layer, at a few of the betas of C2T's curve without."""
    wanted = [curve.cheapest(float(share * curve.tau.max())) for share in np.linspace(0.2, 0.95, SECOND_K_BETAS)]
    betas = np.array([point.setting for point in wanted if point is not None])
    k = min(common.K, ground.forest.k)
    found = {}
    for second_k in SECOND_K:
        policies = [
            C2TTree(classifier=classifier, beta=float(beta), first_k=k, second_k=second_k, d_max=ground.forest.layers)
            for beta in betas
        ]
        points = [common.served(ground.traces, policy) for policy in policies]
        tau, gamma = np.array([point.tau for point in points]), np.array([point.gamma for point in points])
        found[f"C2T, second K = {second_k}"] = Curve(betas, tau, gamma)
    return found


EXPERIMENTS = (
    Experiment(
        name="c2t-v1-figure-2",
        title="Probability and acceptance by entropy and rank",
        source="C2T v1 figure 2, C2T v2 figure 1",
        columns=(
            "draft",
            "entropy",
            "states",
            "paper first token",
            "probability",
            "accepted",
            "bias",
            "bias, ranks 2 on",
        ),
        run=figure_2,
    ),
    Experiment(
        name="c2t-v1-figure-4",
        title="Candidates over accept length: EAGLE-2, a threshold on P, C2T",
        source="C2T v1 figure 4, C2T v2 figures 4 and 7; tau without bonus",
        columns=(
            "draft",
            "tau",
            "paper C2T / EAGLE-2",
            "EAGLE-2",
            "P",
            "C2T, paper's recipe",
            "C2T",
            "C2T, more features",
            *RATIOS.values(),
            "C2T / P",
        ),
        run=figure_4,
    ),
)
