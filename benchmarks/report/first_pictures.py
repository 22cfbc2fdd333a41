"""The three pictures of the first screen of docs/results.md: small, and sharp at any size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from benchmarks.report.evaluations import Part, rule
from benchmarks.report.first_screen import (
    BASELINE,
    LENGTHS,
    ON_P,
    OURS,
    SHIPPED,
    SPEEDS,
    STEPS,
    engine_of,
    pass_ms,
    real_rows,
)
from benchmarks.report.rows import BenchRow
from benchmarks.report.tables import SPEED, load_of

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# inches: 300 pixels of a page wide, so that a phone shows one whole and a wide screen three beside each other
SIZE = (300 / 96, 250 / 96)
STYLE: dict[Any, Any] = {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "legend.fontsize": 6.5,
    "lines.markersize": 3,
    # letters stay letters, and the same rows give the same file
    "svg.fonttype": "none",
    "svg.hashsalt": "c2t",
}


def draw_first(rows: Sequence[BenchRow], evaluation: Part, folder: Path) -> None:
    """All three into the folder; none where no real model was measured. rows: all that are published."""
    real = real_rows(rows)
    if not real:
        return
    with plt.rc_context(STYLE):
        _speeds(real, folder / SPEEDS)
        _lengths(evaluation["chains"], folder / LENGTHS)
        _steps(real, folder / STEPS)


def _speeds(rows: Sequence[BenchRow], path: Path) -> None:
    figure, axes = _panel(f"tokens/s, real model on a CPU, {engine_of(rows)}", "requests at once", "output tokens/s")
    for arm in dict.fromkeys(row.arm for row in rows):
        points = sorted((row for row in rows if row.arm == arm), key=load_of)
        shown, low, high = (
            np.array([row.metrics.get(name) or row.metrics.get(SPEED) or 0.0 for row in points])
            for name in (SPEED, f"{SPEED}_low", f"{SPEED}_high")
        )
        spread = np.clip([shown - low, high - shown], 0.0, None)
        axes.errorbar(list(map(load_of, points)), shown, spread, marker="o", capsize=2, label=arm, **_style(arm))
    loads = sorted({load_of(row) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, labels=list(map(str, loads)))
    _save(figure, axes, path)


def _style(arm: str) -> dict[str, Any]:
    """C2T is what the page is about, and plain decoding what all is compared with."""
    if arm in OURS:
        return {"color": "black", "linewidth": 2.0}
    return {"color": "grey", "linestyle": "--"} if arm == "plain" else {"linewidth": 1.0}


def _lengths(chains: Part, path: Path) -> None:
    title = "accept length, real model"
    figure, axes = _panel(title, "draft tokens verified per step", "tokens per step, bonus included")
    lengths = [tau + 1 for tau in chains["taus"]]
    axes.plot(chains["baselines"][BASELINE], lengths, "o--", color="grey", label="static chains")
    for name, label, style in ((ON_P, "threshold on P", "^-"), (SHIPPED, "C2T", "ks:")):
        axes.plot(rule(chains, name)["compared"][BASELINE]["gamma"], lengths, style, label=label)
    _save(figure, axes, path)


def _steps(rows: Sequence[BenchRow], path: Path) -> None:
    figure, axes = _panel("what a step costs on that CPU", "tokens of a pass of the target", "milliseconds")
    cost = pass_ms(rows)
    axes.plot(list(cost), list(cost.values()), "ko-", label="the target's pass")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(cost), labels=list(map(str, cost)))
    axes.set_ylim(bottom=0.0)
    _save(figure, axes, path)


def _panel(title: str, across: str, up: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=SIZE)
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure, axes


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    # the day of drawing is no part of what is shown
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
