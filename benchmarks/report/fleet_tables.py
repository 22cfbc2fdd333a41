"""The tables of docs/distributed.md, from rows of `python -m benchmarks.simulation.fleet`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.report.command import ROOT
from benchmarks.report.page import write_page
from benchmarks.report.rows import BenchRow
from benchmarks.report.sections import source_line
from benchmarks.report.tables import filled, latest_blocks, table

PAGE = ROOT / "docs/distributed.md"
FLEET, LEARNING = "fleet", "fleet-learning"


def rows_of(rows: Sequence[BenchRow], part: str) -> list[BenchRow]:
    """The newest row of each arm and setting of a part."""
    mine = [row for row in rows if part in (row.setting.get("part"), row.scenario)]
    return [row for block in latest_blocks(mine).values() for row in block]


def good(row: BenchRow) -> str:
    """Tokens per second and replica of the requests that kept both limits, and their share."""
    if row.error:
        return row.error
    return f"{row.metrics['goodput_tokens_per_s']:,.0f} ({row.metrics['good_share']:.0%})"


def grid(
    rows: Sequence[BenchRow],
    head: Sequence[str],
    line: Callable[[BenchRow], Sequence[str]],
    column: Callable[[BenchRow], str],
    cell: Callable[[BenchRow], str],
) -> str:
    """One line for what `line` gives, one column for what `column` gives, in the order of the rows."""
    cells = {(tuple(line(row)), column(row)): cell(row) for row in rows}
    lines, columns = dict.fromkeys(each for each, _ in cells), dict.fromkeys(name for _, name in cells)
    return table([*head, *columns], ([*each, *(cells.get((each, name), "") for name in columns)] for each in lines))


def _replicas(row: BenchRow) -> str:
    return "1 replica" if row.setting["replicas"] == 1 else f"{_number(row, 'replicas')} replicas"


def _number(row: BenchRow, name: str) -> str:
    return f"{float(row.setting[name] or 0):,g}"


def routers(rows: Sequence[BenchRow]) -> str:
    """Every router and arm, by the number of replicas; beside it what the largest fleet finds of prefixes."""
    mine = rows_of(rows, "routers")
    hits = {(row.setting["router"], row.arm): f"{row.metrics['prefix_hits']:.0%}" for row in mine if not row.error}
    head = ["router", "arm", "prefixes found"]
    return grid(
        mine,
        head,
        lambda row: (str(row.setting["router"]), row.arm, hits.get((row.setting["router"], row.arm), "")),
        _replicas,
        good,
    )


def room(row: BenchRow) -> str:
    """Requests per second and replica that a fleet has room for, and the tokens per second that they are."""
    return row.error or f"{row.metrics['room_per_s']:.1f} ({row.metrics['goodput_tokens_per_s']:,.0f})"


def planning(rows: Sequence[BenchRow]) -> str:
    """Every arm, by arrivals."""
    return grid(
        rows_of(rows, "planning"), ["arm"], lambda row: (row.arm,), lambda row: str(row.setting["arrivals"]), room
    )


def apart(rows: Sequence[BenchRow]) -> str:
    """Prompts read on servers of their own, by how many do."""
    return grid(
        rows_of(rows, "apart"),
        ["arm"],
        lambda row: (row.arm,),
        lambda row: f"{_number(row, 'readers')} of {_number(row, 'replicas')} only read",
        room,
    )


def learning(rows: Sequence[BenchRow]) -> str:
    """Seconds until what is learnt is learnt, by the number of replicas."""
    return grid(
        rows_of(rows, LEARNING),
        ["requests at once on each", "drafts from"],
        lambda row: (_number(row, "requests_in_flight"), row.arm),
        _replicas,
        lambda row: f"{row.metrics['seconds']:.2g} s",
    )


def sources(rows: Sequence[BenchRow]) -> str:
    """The runs that all these rows come from."""
    runs = {row.run["utc"]: row.run for part in (*PARTS, LEARNING) for row in rows_of(rows, part)}
    return "\n\n".join(source_line(run) for run in runs.values())


PARTS = ("routers", "planning", "apart")
TABLES: Mapping[str, Callable[[Sequence[BenchRow]], str]] = {
    "fleet-routers": routers,
    "fleet-planning": planning,
    "fleet-apart": apart,
    "fleet-learning": learning,
    "fleet-sources": sources,
}


def render(page: str, rows: Sequence[BenchRow]) -> str:
    """The page with every table between its markers made anew. C2TError without markers."""
    for name, make in TABLES.items():
        page = filled(page, name, f"\n\n{make(rows)}\n\n", PAGE.name)
    return page


def main(argv: list[str]) -> int:
    """Write the tables of docs/distributed.md anew."""
    return write_page("fleet_tables", argv, PAGE, render)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
