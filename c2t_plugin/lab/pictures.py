"""Curves, calibration and rows as matplotlib figures. drawing.py draws decoding steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from c2t_plugin.output import write_whole
from c2t_plugin.provenance import RunRecord

# matplotlib starts its colours again after so many.
COLOURS, MARKERS = 10, "os^Dv"
DPI = 130
TAU, GAMMA = "tau, bonus excluded", "gamma per verification"


def panels(count: int, width: float = 6.0) -> tuple[Figure, Sequence[Axes]]:
    """A figure of `count` panels in a row."""
    figure = Figure(figsize=(width * count, 5), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def save_png(figure: Figure, path: Path, run: RunRecord) -> None:
    """Whole or not at all. The file's text fields say what it came from: Command, Commit, Machine, Date."""
    fields = {"Command": run.command, "Commit": run.commit, "Machine": run.machine, "Date": run.utc}
    write_whole(path, partial(figure.savefig, dpi=DPI, format="png", metadata=fields))


def gamma_over_tau(axis: Axes, title: str, log: bool = False) -> None:
    """Words, scale and legend of a panel that shows what rules verify for what is accepted."""
    axis.set(title=title, xlabel=TAU, ylabel=GAMMA)
    if log:
        axis.set_yscale("log")
        axis.set_ylim(bottom=0.5)
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)


def evaluation_figure(record: Mapping[str, Any]) -> Figure:
    """What `c2t evaluate` found, as its JSON holds it: chains, trees, and the calibration of both."""
    figure, axes = panels(4)
    for part, baseline, curves, reliability in (
        ("chains", "static", axes[0], axes[2]),
        ("trees", "EAGLE-2", axes[1], axes[3]),
    ):
        found = record[part]
        taus = found["taus"]
        curves.plot(taus, _numbers(found["baselines"][baseline]), "k--", label=baseline)
        colours = {}
        for rule in found["rules"]:
            compared = rule["compared"][baseline]
            (line,) = curves.plot(taus, _numbers(compared["gamma"]), marker=".", label=rule["name"])
            colours[rule["name"]] = line.get_color()
            low, high = np.array([_numbers(pair) for pair in compared["gamma_interval"]]).T
            curves.fill_between(taus, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        gamma_over_tau(curves, f"{part}, 95% intervals", log=part == "trees")
        reliability_panel(reliability, f"calibration on {part}", found["rules"], colours)
    return figure


def reliability_panel(axis: Axes, title: str, rules: Sequence[Mapping[str, Any]], colours: Mapping[str, Any]) -> None:
    """Accepted share over confidence, one point per bin, of the rules that give a probability."""
    axis.plot([0, 1], [0, 1], "k--", linewidth=0.8)
    for rule in rules:
        if rule["calibration"] is not None:
            _, confidence, accepted = np.array(rule["calibration"]["bins"]).T
            label = f"{rule['name']}, ECE {rule['calibration']['error']:.3f}"
            axis.plot(confidence, accepted, marker=".", color=colours[rule["name"]], label=label)
    axis.set(title=title, xlabel="mean confidence of the bin", ylabel="accepted share")
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)


def rows_figure(title: str, rows: Sequence[Mapping[str, Any]], gamma: str) -> Figure:
    """Rows of an experiment as points. gamma: the column on the y axis; text columns, or the first, name a point."""
    figure, (axis,) = panels(1, 8.0)
    for number, row in enumerate(rows):
        words = [value for value in row.values() if isinstance(value, str)]
        name = ", ".join(words) if words else "{} {}".format(*next(iter(row.items())))
        axis.plot([row["tau"]], [row[gamma]], MARKERS[number // COLOURS % len(MARKERS)], label=name)
    axis.set(title=title, xlabel=TAU, ylabel=gamma)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="x-small")
    return figure


def bars_figure(
    drawn: Mapping[str, Mapping[str, Mapping[str, float | None]]], quantity: str, width: float = 6.0
) -> Figure:
    """A panel of horizontal bars per title; in it a group per name, a bar per series. None draws nothing.

    drawn: title -> name -> series -> value, the same series everywhere. quantity: what the values are.
    """
    figure, axes = panels(len(drawn), width)
    for axis, (title, groups) in zip(axes, drawn.items(), strict=True):
        series = list(next(iter(groups.values())))
        height = 0.8 / len(series)
        for number, name in enumerate(series):
            places = np.arange(len(groups)) + (number - (len(series) - 1) / 2) * height
            axis.barh(places, _numbers([group[name] for group in groups.values()]), height, label=name)
        axis.set_yticks(range(len(groups)), list(groups), fontsize="small")
        axis.invert_yaxis()
        axis.set(title=title, xlabel=quantity)
        axis.grid(alpha=0.3, axis="x")
        if len(series) > 1:
            axis.legend(fontsize="small")
    return figure


def _numbers(values: Sequence[float | None]) -> list[float]:
    """JSON has no word for NaN."""
    return [float("nan") if value is None else float(value) for value in values]
