"""Pictures of rows: what each verified draft token buys, throughput by batch size, the planner's choice by load."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from benchmarks.report.rows import MEASURED_CPU, BenchRow, ServingRow
from benchmarks.report.simulated_page import title_of
from benchmarks.report.tables import AUTO, LOADS, RATIO, SPEED, latest_blocks, load_of, measured_blocks

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

# Enough to see who wins where; the tables have every arm.
SHOWN = ("plain", "static 2", "static 4", "SGLang adaptive", "P >= 0.3", "C2T beta 0.5", "EAGLE-2 tree of 60", AUTO)
TITLE_WIDTH = 110
COLOURS = 64
TITLES = {"standalone": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE-3"}


def draw(rows: Sequence[ServingRow], path: Path) -> None:
    """One panel a base: static chains of growing length, and C2T at falling beta on the same server.

    rows: the sweep rows of a run; those of arm `static` are one line, those of arm `c2t` the other.
    """
    bases = [base for base in TITLES if any(row.base == base for row in rows)]
    figure, panels = plt.subplots(1, len(bases), figsize=(5.5 * len(bases), 4.5), squeeze=False)
    for base, axes in zip(bases, panels[0], strict=True):
        for arm, style in (("static", "o--"), ("c2t", "s-")):
            points = sorted(
                (row for row in rows if (row.base, row.arm) == (base, arm)), key=lambda r: r.gamma_per_token
            )
            label = "static chain, length as marked" if arm == "static" else "C2T, beta as marked"
            axes.plot(
                [row.gamma_per_token for row in points], [accept_len_of(row) for row in points], style, label=label
            )
            for row in points:
                note = str(row.d_max) if arm == "static" else f"{row.beta:g}"
                below = (0, -13) if arm == "static" else (0, 6)
                axes.annotate(
                    note, (row.gamma_per_token, accept_len_of(row)), below, textcoords="offset points", ha="center"
                )
        axes.set_title(TITLES[base])
        axes.set_xlabel("verified draft tokens per output token")
        axes.set_ylabel("accept length, the bonus token counted")
        axes.grid(alpha=0.3)
        axes.legend()
    _save(figure, path)


def simulated_blocks(rows: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """Simulated rows with figures, by setting."""
    blocks = latest_blocks(row for row in rows if row.scenario == "simulated")
    priced = ([row for row in found if not row.error] for found in blocks.values())
    return [found for found in priced if found]


def draw_throughput(rows: Sequence[BenchRow], path: Path) -> None:
    """One panel a simulated setting: each arm's ratio to plain decoding over the number of requests in flight."""
    blocks = simulated_blocks(rows)
    columns = min(2, len(blocks))
    lines = -(-len(blocks) // columns)
    figure, panels = plt.subplots(lines, columns, figsize=(6.5 * columns, 4.2 * lines), squeeze=False)
    for axes, found in zip(panels.flat, blocks, strict=False):
        for arm in SHOWN:
            points = sorted((load_of(row), row.metrics["ratio_to_plain"]) for row in found if row.arm == arm)
            if not points:  # no load of it could be priced
                continue
            style = {"linewidth": 2.5, "color": "black"} if arm == AUTO else {}
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=arm, **style)
        axes.set_title(title_of(found[0].setting), fontsize=8)
        _by_load(axes, found)
        axes.set_ylabel("simulated output tokens/s over plain")
        axes.grid(alpha=0.3)
    for axes in panels.flat[len(blocks) :]:
        axes.axis("off")
    panels[0][0].legend(fontsize=7)
    _save(figure, path)


def draw_measured(rows: Sequence[BenchRow], path: Path) -> None:
    """One panel a measured setting: every arm's ratio to plain decoding, with its interval, by concurrency."""
    blocks = measured_blocks(rows)
    figure, panels = plt.subplots(len(blocks), 1, figsize=(8, 4.5 * len(blocks)), squeeze=False)
    for axes, found in zip(panels.flat, blocks, strict=True):
        for arm in dict.fromkeys(row.arm for row in found):
            points = sorted((row for row in found if row.arm == arm), key=load_of)
            ratios = [row.metrics[RATIO] or 0.0 for row in points]
            # a row of one pass has no interval
            low = [
                ratio - (row.metrics.get(f"{RATIO}_low") or ratio) for row, ratio in zip(points, ratios, strict=True)
            ]
            high = [
                (row.metrics.get(f"{RATIO}_high") or ratio) - ratio for row, ratio in zip(points, ratios, strict=True)
            ]
            spread = np.clip([low, high], 0.0, None)
            axes.errorbar(list(map(load_of, points)), ratios, spread, marker="o", markersize=3, capsize=3, label=arm)
        _by_load(axes, found)
        setting = ", ".join(f"{name} {value}" for name, value in found[0].setting.items() if name not in LOADS)
        title = f"{found[0].scenario}: {setting}; {found[0].run['machine']}"
        axes.set_title("\n".join(textwrap.wrap(title, TITLE_WIDTH)), fontsize=8)
        axes.set_ylabel("measured output tokens/s over plain")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    _save(figure, path)


def draw_speeds(rows: Sequence[BenchRow], path: Path) -> None:
    """One panel a setting of measured-cpu rows: every arm's output tokens/s with its interval, by concurrency."""
    # what ran at several loads in turn has no place on that axis
    blocks = [found for found in measured_blocks(rows, MEASURED_CPU) if all(map(load_of, found))]
    figure, panels = plt.subplots(len(blocks), 1, figsize=(8, 4.5 * len(blocks)), squeeze=False)
    for axes, found in zip(panels.flat, blocks, strict=True):
        for arm in dict.fromkeys(row.arm for row in found):
            points = sorted((row for row in found if row.arm == arm), key=load_of)
            speeds, low, high = (
                np.array([row.metrics.get(name) or row.metrics[SPEED] for row in points], dtype=float)
                for name in (SPEED, f"{SPEED}_low", f"{SPEED}_high")
            )
            style = {"linewidth": 2.5, "color": "black"} if arm == "plain" else {}
            spread = np.clip([speeds - low, high - speeds], 0.0, None)
            axes.errorbar(
                list(map(load_of, points)), speeds, spread, marker="o", markersize=3, capsize=3, label=arm, **style
            )
        _by_load(axes, found)
        setting = found[0].setting
        axes.set_title(
            f"{found[0].scenario}, {setting.get('engine')}, temperature {setting.get('temperature')}; "
            f"{setting['processor']}, {setting['threads']} threads",
            fontsize=8,
        )
        axes.set_ylabel("output tokens/s, measured on this CPU")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    _save(figure, path)


LEARNT = {
    "nll": "nats per draft token",
    "gamma_ratio": "verified tokens over static chains'",
    "tokens_per_s_8": "a planner's tokens/s, 8 requests",
}


def learning_blocks(rows: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """Simulated learning while serving, by stream."""
    found = [row for row in rows if row.scenario == "learning" and not row.setting["poisoned"]]
    return list(latest_blocks(found, lambda row: (("stream", row.setting["stream"]),)).values())


def draw_learning(rows: Sequence[BenchRow], path: Path) -> None:
    """A column a stream, a row each of LEARNT: what was learnt, by the states that it was learnt from."""
    blocks = learning_blocks(rows)
    size = (4.6 * len(blocks), 3.2 * len(LEARNT))
    figure, panels = plt.subplots(len(LEARNT), len(blocks), figsize=size, squeeze=False, sharex=True)
    for column, found in enumerate(blocks):
        for (metric, what), axes in zip(LEARNT.items(), panels[:, column], strict=True):
            _draw_learnt(axes, found, metric)
            axes.set_ylabel(what)
        panels[0, column].set_title(str(found[0].setting["stream"]), fontsize=9)
        panels[0, column].legend(fontsize=7)
        panels[-1, column].set_xlabel("states served (leftmost: none)")
    _save(figure, path)


def _draw_learnt(axes: Axes, rows: Sequence[BenchRow], metric: str) -> None:
    for arm in dict.fromkeys(row.arm for row in rows):
        # 0 has no place on such a scale
        points = sorted(
            (max(float(row.setting["states"] or 0), 20.0), row.metrics[metric])
            for row in rows
            if row.arm == arm and row.metrics.get(metric) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-" if arm.startswith("from") else "s--", markersize=3, label=arm)
    axes.set_xscale("log")
    axes.grid(alpha=0.3)


def accept_len_of(row: ServingRow) -> float:
    """Tokens per verify step, the bonus token counted."""
    return (row.tau or 0.0) + 1


def draw_planner(rows: Sequence[BenchRow], path: Path) -> None:
    """What the planner verifies per request and step, and what of it is accepted, by the number of requests."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    for found in simulated_blocks(rows):
        planned = sorted((row for row in found if row.arm == AUTO), key=load_of)
        loads = [load_of(row) for row in planned]
        (line,) = axes.plot(
            loads, [row.metrics["gamma_per_step"] or 0.0 for row in planned], "o-", label=title_of(found[0].setting)
        )
        axes.plot(loads, [row.metrics["tau"] or 0.0 for row in planned], "x--", color=line.get_color())
    _by_load(axes, [row for found in simulated_blocks(rows) for row in found])
    axes.set_ylabel("draft tokens per request and step:\nverified (line), accepted (dashes)")
    axes.set_title("the planner's choice by load, simulated")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    _save(figure, path)


def _by_load(axes: Axes, rows: Sequence[BenchRow]) -> None:
    loads = sorted({load_of(row) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, labels=list(map(str, loads)))
    axes.set_xlabel("requests in flight")


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    # lines and letters need few colours, and a picture that is committed takes a quarter of the room
    with Image.open(path) as drawn:
        few = drawn.convert("RGB").quantize(COLOURS)
    few.save(path, optimize=True)
    plt.close(figure)
