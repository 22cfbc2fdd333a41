"""DySpec 4.3 and 5.3: its headline figures and its latency model, from the tables that it prints itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.papers import equations
from benchmarks.papers.experiment import Bench, Experiment, Findings


def overhead(bench: Bench) -> Findings:
    rows = equations.dyspec_rows()
    return Findings(rows, remark(rows))


def remark(rows: Sequence[equations.Row]) -> str:
    """What dyspec_rows say: bounds that do not hold, rows that Sequoia wins, how far the latency model is off."""
    bounds = _named(rows, "DySpec 4.3, N / e above")
    missed = [row for row in bounds if row["ours"] <= row["paper"]]
    rivals = _named(rows, "DySpec 5.3, tokens per step")
    behind = [row for row in rivals if row["paper"] > row["ours"]]
    return (
        f"N / e is not above the printed bound in {len(missed)} of {len(bounds)} rows of tables 1 to 4. "
        f"Sequoia accepts more tokens per step than DySpec in {len(behind)} of {len(rivals)}. Against the printed "
        f"latencies, the model's acceleration is {_model(rows, 2000):.2f}x with the printed T_t / T_d of 2000 and "
        f"{_model(rows, 200):.2f}x with the 200 that 5 s and 25 ms give (median of tables 3 and 4)."
    )


def _model(rows: Sequence[equations.Row], ratio: int) -> float:
    found = _named(rows, f"DySpec 4.3, acceleration 1 / k at T_t / T_d = {ratio},")
    return statistics.median(row["ours"] / row["paper"] for row in found)


def _named(rows: Sequence[equations.Row], start: str) -> list[equations.Row]:
    return [row for row in rows if row["what"].startswith(start)]


EXPERIMENTS = (
    Experiment(
        name="dyspec-overhead",
        title="Headline figures, nodes per token, and the latency model k = 1/e + N T_d / (e T_t)",
        source="DySpec abstract, 4.3, 5.3 and C.1, from its tables 1 to 4",
        columns=("what", "paper", "ours"),
        run=overhead,
    ),
)
