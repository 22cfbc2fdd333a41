"""The tables of docs/training.md on what is learnt without training, from rows of `benchmarks.simulation.learning`, and
of `benchmarks.simulation.censoring` where the page has the markers for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.report.command import ROOT
from benchmarks.report.page import write_page
from benchmarks.report.rows import BenchRow
from benchmarks.report.sections import source_line
from benchmarks.report.tables import filled, latest_blocks, markers, table
from benchmarks.simulation import censoring as cuts
from benchmarks.simulation.learning import LOADS, OFFLINE, SCENARIO

PAGE = ROOT / "docs/training.md"
NAME, SOURCES = "learning", "learning-sources"
CENSORING, CENSORING_SOURCES = "censoring", "censoring-sources"
STATES, AFTER = (0, 500, 2_000, 10_000, 50_000), 10_000


def learning(rows: Sequence[BenchRow]) -> str:
    """A line a stream and start: nats by states, then figures after AFTER, of a poisoned stream beside them."""
    head = ["stream", "starts from", *(f"{states:,}" for states in STATES)]
    head += [f"gamma ratio after {AFTER:,}", "a tenth poisoned"]
    head += [f"tokens/s at {load}" for load in LOADS] + ["a tenth poisoned"]
    return table(head, (line for block in _streams(rows) for line in _lines(block)))


def censoring(rows: Sequence[BenchRow]) -> str:
    """A line a stream, start and way to verify: nats by states, and draft tokens verified of a draft in the end."""
    head = ["stream", "starts from", "verified", *(f"{states:,}" for states in STATES), "verified of a draft"]
    lines = []
    for block in _streams(rows, cuts.SCENARIO):
        at = {(row.arm, row.setting["verified"], row.setting["states"]): row.metrics for row in block}
        # the ways of a start beside each other
        for arm in dict.fromkeys(row.arm for row in block):
            for verified in cuts.VERIFIED:
                nats = (_short(at[arm, verified, states]["nll"]) for states in STATES)
                tokens = at[arm, verified, STATES[-1]]["verified_per_draft"] or 0.0
                name = str(block[0].setting["stream"]), arm.removeprefix("from "), verified
                lines.append([*name, *nats, f"{tokens:.2f}"])
    return table(head, lines)


def _streams(rows: Sequence[BenchRow], scenario: str = SCENARIO) -> list[list[BenchRow]]:
    """Newest rows by stream, those of poisoned streams too."""
    mine = [row for row in rows if row.scenario == scenario]
    return list(latest_blocks(mine, lambda row: (("stream", row.setting["stream"]),)).values())


def _lines(block: Sequence[BenchRow]) -> list[list[str]]:
    at = {(row.arm, row.setting["states"], row.setting["poisoned"]): row.metrics for row in block}
    # a planner with the offline fit as it was at first
    goal = at[f"from {OFFLINE}", 0, 0]

    def share(arm: str, poisoned: int, load: int) -> str:
        found, best = (of.get(f"tokens_per_s_{load}") for of in (at[arm, AFTER, poisoned], goal))
        return f"{found / best:.3f}" if found and best else ""

    return [
        [
            str(block[0].setting["stream"]),
            arm.removeprefix("from "),
            *(_short(at[arm, states, 0]["nll"]) for states in STATES),
            *(_short(at[arm, AFTER, poisoned]["gamma_ratio"]) for poisoned in (0, 1)),
            *(share(arm, 0, load) for load in LOADS),
            share(arm, 1, LOADS[1]),
        ]
        for arm in dict.fromkeys(row.arm for row in block)
    ]


def _short(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.3f}".removeprefix("0")


def sources(rows: Sequence[BenchRow], scenario: str = SCENARIO) -> str:
    """The runs that these rows come from."""
    runs = {row.run["utc"]: row.run for block in _streams(rows, scenario) for row in block}
    return "\n\n".join(source_line(run) for run in runs.values())


def render(page: str, rows: Sequence[BenchRow]) -> str:
    """The page with its tables and their sources made anew. C2TError without the markers of the first."""
    made = {NAME: learning(rows), SOURCES: sources(rows)}
    if markers(CENSORING)[0] in page:
        made |= {CENSORING: censoring(rows), CENSORING_SOURCES: sources(rows, cuts.SCENARIO)}
    for name, text in made.items():
        page = filled(page, name, f"\n\n{text}\n\n", PAGE.name)
    return page


def main(argv: list[str]) -> int:
    """Write the tables of docs/training.md anew."""
    return write_page("learning_table", argv, PAGE, render)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
