"""Two files of rows side by side: python -m benchmarks.report.compare OLD NEW. Only what can be compared is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.report.tables import METRICS
from c2t_plugin.errors import C2TError

# The code under test may differ, that is what a comparison is for; what it runs on may not.
OWN = "c2t-plugin"
PIPE_WIDTH = 140


def keyed(rows: Sequence[BenchRow]) -> dict[str, BenchRow]:
    """The newest row of every scenario, arm and setting."""
    ordered = sorted(rows, key=lambda row: row.run["utc"])
    return {json.dumps([row.scenario, row.kind, row.arm, dict(row.setting)], sort_keys=True): row for row in ordered}


def check_alike(old: Sequence[BenchRow], new: Sequence[BenchRow]) -> None:
    """C2TError unless all rows come from one machine and one set of versions, the project's own aside."""
    for what in ("machine", "versions"):
        found = {_words(row, what) for row in [*old, *new]}
        if len(found) > 1:
            raise C2TError(f"these rows differ in {what} and cannot be compared: {'; '.join(sorted(found))}")


def _words(row: BenchRow, what: str) -> str:
    value = row.run[what]
    if isinstance(value, str):
        return value
    return ", ".join(f"{name} {version}" for name, version in sorted(value.items()) if name != OWN)


def compared(old: Sequence[BenchRow], new: Sequence[BenchRow]) -> list[tuple[BenchRow, BenchRow]]:
    """Pairs of the same scenario, arm and setting. C2TError if there are none, or if check_alike refuses."""
    check_alike(old, new)
    before, after = keyed(old), keyed(new)
    pairs = [(before[key], row) for key, row in after.items() if key in before]
    if not pairs:
        raise C2TError("no scenario, arm and setting is in both files")
    return pairs


def ratios(old: BenchRow, new: BenchRow) -> dict[str, float]:
    """new over old of every metric of METRICS that both have and that is not 0 in the old one."""
    both = {name: (old.metrics.get(name), new.metrics.get(name)) for name in METRICS}
    return {name: after / before for name, (before, after) in both.items() if before and after is not None}


def main(argv: list[str]) -> int:
    """Print new over old of every metric; status 2 with one line if the rows cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args(argv)
    try:
        pairs = compared(read_rows(options.old, BenchRow), read_rows(options.new, BenchRow))
    except C2TError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    found = [ratios(old, new) for old, new in pairs]
    shown = [name for name in METRICS if any(name in each for each in found)]
    table = Table("scenario", "arm", "setting", *(METRICS[name][0] for name in shown), title="new over old")
    for (_, new), each in zip(pairs, found, strict=True):
        setting = ", ".join(f"{name} {value}" for name, value in new.setting.items())
        cells = (f"{each[name]:.3f}" if name in each else "" for name in shown)
        table.add_row(new.scenario, new.arm, new.error or setting, *cells)
    (Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
