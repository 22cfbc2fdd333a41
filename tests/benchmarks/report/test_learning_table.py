"""The table of docs/learning.md on learning is that of the rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report import learning_table
from benchmarks.report.command import RESULTS
from benchmarks.report.learning_table import (
    KINDS,
    LOADS,
    PAGE,
    TURNED,
    censoring,
    drifting,
    learning,
    main,
    render,
    served,
    taken,
)
from benchmarks.report.rows import FILE_OF, BenchRow, read_rows
from benchmarks.simulation.censoring import VERIFIED
from c2t_plugin.errors import C2TError

STATES = (0, 500, 2_000, 10_000, 50_000)


@pytest.fixture(scope="module")
def rows() -> list[BenchRow]:
    return [row for kind in KINDS for row in read_rows(RESULTS / FILE_OF[kind], BenchRow)]


RUN = {
    "utc": "2026-01-01T00:00:00+00:00",
    "command": "c",
    "machine": "m",
    "git_sha": "0" * 40,
    "dirty": False,
    "seed": 0,
    "versions": {},
}


TABLES = ("learning", "censoring", "drifting", "learning-served", "learning-time")
NAMES = tuple(name for each in TABLES for name in (each, f"{each}-sources"))


def marked(*names: str) -> str:
    """A page with the markers of these tables."""
    return "".join(f"<!-- table:{name} -->\nold\n<!-- /table:{name} -->\n" for name in names)


def made_up(arm: str, states: int, poisoned: int, speed: float, nats: float = 0.0) -> BenchRow:
    metrics: dict[str, float | None] = {"nll": 0.5 - states / 1e6 + nats, "gamma_ratio": 0.7 + poisoned / 10}
    metrics |= {f"tokens_per_s_{load}": speed * load for load in LOADS}
    label = {"stream": "made up", "states": states, "poisoned": poisoned}
    return BenchRow("learning", "simulated", arm, label, metrics, "", RUN)


def cut(arm: str, states: int, verified: str) -> BenchRow:
    metrics: dict[str, float | None] = {"nll": 0.5 - states / 1e5 + len(verified) / 100}
    if states:
        metrics["verified_per_draft"] = 6.0 / len(verified)
    label = {"stream": "made up", "states": states, "verified": verified}
    return BenchRow("censoring", "simulated", arm, label, metrics, "", {**RUN, "command": "other"})


RIVAL = [made_up("vLLM's estimator", states, bad, 50.0, nats=0.01) for states in STATES for bad in (0, 1)]


def test_the_page_shows_the_committed_rows(rows: list[BenchRow]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert render(text, rows) == text


def test_speeds_are_over_those_of_the_offline_fit_before_it_learnt() -> None:
    arms = {"from offline fit": 100.0, "from nothing": 80.0}
    made = [
        made_up(arm, states, bad, speed - bad) for arm, speed in arms.items() for states in STATES for bad in (0, 1)
    ]
    offline, nothing, _ = learning([*made, *RIVAL]).splitlines()[2:5]
    assert offline.endswith("| .500 | .499 | .498 | .490 | .450 | .700 | .800 | 1.000 | 1.000 | 1.000 | 0.990 |")
    assert nothing.startswith("| made up | nothing |") and nothing.endswith("| 0.800 | 0.800 | 0.800 | 0.988 |")


def test_goals_that_are_met_and_missed_are_said() -> None:
    arms = {"from offline fit": 100.0, "from nothing": 40.0}
    made = [
        made_up(arm, states, bad, speed - bad, nats=0.1 * (arm == "from nothing" and states == 2_000))
        for arm, speed in arms.items()
        for states in STATES
        for bad in (0, 1)
    ]
    nats, poison = learning([*made, *RIVAL]).splitlines()[-2:]
    assert nats == (
        "- From 500 states on, 7 of 8 figures are better than vLLM's estimator's on the same stream. "
        "Not: made up from nothing after 2,000, by 0.0900 nats."
    )
    assert poison == (
        "- A poisoned tenth is to cost at most 2% of the same arm's tokens/s after 10,000 states. "
        "Missed: made up from nothing 2.5% at 1."
    )
    nats, poison = learning([row for row in [*made, *RIVAL] if row.arm != "from nothing"]).splitlines()[-2:]
    assert nats.endswith("4 of 4 figures are better than vLLM's estimator's on the same stream.")
    assert poison.endswith("after 10,000 states, and does.")


def test_the_page_shows_what_cuts_make_of_it() -> None:
    rows = [cut(f"from {arm}", states, way) for way in VERIFIED for arm in ("one", "other") for states in STATES]
    lines = censoring(rows).splitlines()[-2 * len(VERIFIED) :]
    assert [line.split(" | ")[1:3] for line in lines] == [[arm, way] for arm in ("one", "other") for way in VERIFIED]
    assert lines[1] == "| made up | one | as cut | .560 | .555 | .540 | .460 | .060 | 1.00 |"
    # older rows lack ways that came later
    assert censoring([row for row in rows if row.setting["verified"] != VERIFIED[-1]]).splitlines()[-1] == lines[-2]
    made = [made_up("from offline fit", states, bad, 1.0) for states in STATES for bad in (0, 1)]
    page = render(marked(*NAMES), made + RIVAL + rows)
    assert "| made up | one | as cut | .560 |" in page and "`other`" in page
    with pytest.raises(C2TError, match=NAMES[-1]):
        render(marked(*NAMES[:-1]), made + RIVAL + rows)


def test_a_turn_stands_beside_a_stream_without_one() -> None:
    made = [made_up("from offline fit", states, 0, 1.0) for states in STATES] + RIVAL
    turned = [made_up("from offline fit", states, 0, 1.0, nats=1.0 / (1 + states)) for states in TURNED]
    turned = [replace(row, scenario="drifting", setting={**row.setting, "before": 10}) for row in turned]
    (line,) = drifting([*made, *turned]).splitlines()[2:]
    assert line == "| made up | offline fit | 1.500 | .510 | .501 | .498 | .490 | .450 | .450 |"
    # of a stream that was not served without one
    (line,) = drifting(turned).splitlines()[2:]
    assert line.endswith("| .450 |  |")


def test_what_it_takes_has_a_line_a_way_and_the_worst_of_all_loads() -> None:
    def row(arm: str, load: int, ms: float, utc: str = RUN["utc"], **more: float) -> BenchRow:
        metrics = {"learning_ms": ms, "learning_p99_ms": 4 * ms, **more}
        return BenchRow("learning-time", "functional", arm, {"concurrency": load}, metrics, "", {**RUN, "utc": utc})

    old = row("calibrate", 1, 9.0, utc="2025-01-01T00:00:00+00:00")
    new = [row("calibrate", 1, 0.1), row("calibrate", 8, 0.2), row("network", 1, 0.3, fit_ms=1.2, minibatch_ms=0.5)]
    lines = taken([old, *new]).splitlines()
    head = "| learns | ms a step of 1 | ms a step of 8 | of one in 100 more than | a fit, ms | a minibatch, ms |"
    assert lines[0] == head
    assert lines[2:] == ["| calibrate | 0.10 | 0.20 | 0.8 |  |  |", "| network | 0.30 |  | 1.2 | 1.20 | 0.50 |"]


def test_a_server_says_how_many_networks_came_in_force() -> None:
    metrics = {"nll_prior": 0.5, "nll_learnt": 0.4, "auc_prior": 0.8, "auc_learnt": 0.9}
    rows = [
        BenchRow("learning-served", "functional", "from x", {"verified": 500}, {**metrics, **more}, "", RUN)
        for more in ({}, {"networks_in_force": 2.0})
    ]
    assert [line.split(" | ")[-1] for line in served(rows).splitlines()[2:]] == [" |", "2 |"]
    # of each engine the newest run
    other = replace(
        rows[0], setting={"verified": 500, "engine": "vllm"}, run={**RUN, "utc": "2026-01-02T00:00:00+00:00"}
    )
    names = [line.split(" | ")[0] for line in served([*rows, other]).splitlines()[2:]]
    assert names == ["| toy, EAGLE-3", "| toy, EAGLE-3", "| toy, EAGLE-3, vLLM"]


def test_the_command_writes_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "learning.md"
    page.write_text(marked(*NAMES))
    monkeypatch.setattr(learning_table, "PAGE", page)
    assert main([]) == 0
    text = page.read_text(encoding="utf-8")
    assert "old" not in text and "| vLLM's estimator |" in text
    with pytest.raises(C2TError, match="markers"):
        render("", [])
    page.write_text("", encoding="utf-8")
    assert main([]) == 2
