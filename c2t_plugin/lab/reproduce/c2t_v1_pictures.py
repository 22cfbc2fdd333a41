"""C2T's statistics of distributions and its curves: v1 figures 2, 4, 9 and 10, with v2's of the same things."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.lab.reproduce.c2t_v1_common import TITLES
from c2t_plugin.lab.reproduce.experiment import Bench, Experiment, Findings, Row
from c2t_plugin.lab.trees import Forest

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
    found = {title: by_entropy_and_rank(bench.traces(draft).tree) for draft, title in TITLES.items()}
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
    for title in TITLES.values():
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
            axis.set(title=f"{title}: {what}", xlabel="rank", ylabel="entropy, nats")
            axis.set_yticks(range(len(INTERVALS)), INTERVALS)
            figure.colorbar(image, ax=axis)
    return figure


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
)
