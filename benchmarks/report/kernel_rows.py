"""Rows of the standing GPU script's kernel parts, as they are published, and their tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.rows import BenchRow
from benchmarks.report.tables import Block, ran_on, table
from benchmarks.serving.options import kind_of
from c2t_plugin.errors import C2TError

SCENARIO = "kernels: "
HOW = ("captured", "cached")
NUMBERS = ("us", "us_p20", "us_p80", "replays", "warm_up", "gb_per_s", "of_copy", "first_s", "error")
HEADER = ["shape", "provider", "time, us", "GB/s", "share of a copy", "largest error", "notes"]


def is_kernel_row(row: BenchRow) -> bool:
    """Whether `kernel_row` made it."""
    return row.scenario.startswith(SCENARIO)


def kernel_row(values: Mapping[str, Any]) -> BenchRow:
    """The row of one provider on one shape from a benchmarks.gpu.part.GpuRow as JSON.

    A provider that failed, or that its machine has not, keeps the reason in place of metrics.
    """
    metrics = {name: values[name] for name in NUMBERS if values[name] is not None}
    error = values["fault"] or (f"absent: {values['absent']}" if values["absent"] else "")
    timed = values["us"] is not None or values["gb_per_s"] is not None
    return BenchRow(
        scenario=SCENARIO + values["part"],
        kind=kind_of(values["run"], cpu=not timed and not error),
        arm=values["provider"] or values["part"],
        setting={**values["shape"], **{name: "yes" if values[name] else "no" for name in HOW}},
        metrics={} if error else metrics,
        error=error,
        run=values["run"],
    )


def read_kernel_rows(path: Path) -> list[BenchRow]:
    """All rows of OUT/gpu.jsonl. C2TError on a line that is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(kernel_row(json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError, C2TError) as error:
            raise C2TError(f"{path.name}, line {number}: {error}") from error
    return rows


def part_of(row: BenchRow) -> Block:
    """Rows of one part and kind on one machine make one table, whatever the shape."""
    return (("scenario", row.scenario), ("kind", row.kind), *ran_on(row))


def kernel_table(rows: Sequence[BenchRow]) -> str:
    """Every provider on every shape, those that failed or are absent too."""
    return table(HEADER, [_line(row) for row in rows])


def _line(row: BenchRow) -> list[str]:
    shape = ", ".join(f"{name} {value}" for name, value in row.setting.items() if name not in HOW)
    forms = {"us": ",.1f", "gb_per_s": ",.0f", "of_copy": ".0%", "error": ".2g"}
    numbers = [f"{row.metrics[name]:{form}}" if name in row.metrics else "" for name, form in forms.items()]
    return [shape, row.arm, *numbers, row.error or "from cache" * (row.setting["cached"] == "yes")]
