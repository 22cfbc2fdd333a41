"""The goals for C2T's trees, judged from rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.gpu.tree_goals import summary
from benchmarks.report.rows import BenchRow
from c2t_plugin.provenance import RunRecord

RUN = {**RunRecord.capture().to_json(), "machine": "1 x GPU"}


def row(arm: str, load: int, speed: float, tau: float | None, gamma: float | None, **changes: Any) -> BenchRow:
    # a whole pass says the opposite, and is not what is judged
    metrics = {"output_tokens_per_s": 1e3 / speed, "decode_tokens_per_s": speed, "tau": tau, "gamma": gamma}
    metrics["decode_step_ms"] = 8.0
    setting = {"check": "throughput", "concurrency": load}
    return BenchRow(
        **{
            **{"scenario": "gpu-serving", "kind": "measured", "arm": arm, "setting": setting, "metrics": metrics},
            **{"error": "", "run": RUN, **changes},
        }
    )


def goals(*rows: BenchRow) -> list[str]:
    return [line.removeprefix("goal: ") for line in summary(rows).splitlines() if line.startswith("goal:")]


EAGLE = row("EAGLE-2 tree of 64", 1, 200.0, 3.0, 60.0)


@pytest.mark.parametrize(
    ("gamma", "speed", "told"),
    [
        # halfway between a tau of 2 at 20 nodes and one of 4
        (60.0, 200.0, ["met (0.67x)", "met (1.00x)"]),
        (80.0, 199.0, ["missed (0.83x)", "missed (0.99x)"]),
    ],
)
def test_gamma_is_compared_at_equal_tau(gamma: float, speed: float, told: list[str]):
    found = goals(
        EAGLE,
        # too few tokens accepted to stand for the same tau
        row("C2T tree of 64, beta 0.2", 1, 999.0, 2.0, 20.0),
        row("C2T tree of 128, beta 0", 1, speed, 4.0, gamma),
    )
    assert [line.rsplit(": ", 1)[1] for line in found] == told
    assert found[0].startswith(
        "verified tokens at most 0.75x of EAGLE-2 tree of 64's at its accept length, one request"
    )


def test_a_tau_that_is_not_reached_misses_both():
    found = goals(EAGLE, row("C2T tree of 64, beta 0.2", 1, 999.0, 2.9, 20.0))
    assert [line.rsplit(": ", 1)[1] for line in found] == ["missed (no C2T tree accepts so many)"] * 2


@pytest.mark.parametrize(("speed", "told"), [(900.0, "met (1.00x"), (899.0, "missed (1.00x"), (450.0, "missed (0.50x")])
def test_batches_are_compared_with_the_better_rival(speed: float, told: str):
    (found,) = goals(
        row("C2T tree of 64, batches, beta 0.3", 8, speed, 3.0, 20.0),
        row("c2t, at most 6, beta 0.4", 8, 900.0, 2.0, 3.0),
        row("EAGLE-2 tree of 64", 8, 800.0, 3.0, 60.0),
        # beyond the goal
        row("C2T tree of 64, batches, beta 0.3", 32, 1.0, 3.0, 20.0),
        row("c2t, at most 6, beta 0.4", 32, 900.0, 2.0, 3.0),
        row("EAGLE-2 tree of 64", 32, 800.0, 3.0, 60.0),
    )
    assert "8 requests: " + told in found and "of c2t, at most 6, beta 0.4)" in found


def test_without_a_rival_nothing_is_judged():
    assert goals(row("C2T tree of 64", 1, 1.0, 1.0, 1.0), row("C2T tree of 64, batches", 8, 1.0, 1.0, 1.0)) == []
    assert goals(EAGLE) == []


def test_a_pass_whose_log_says_nothing_of_decoding_judges_nothing():
    silent = {**EAGLE.metrics, "decode_tokens_per_s": None}
    ours = row("C2T tree of 64", 1, 300.0, 4.0, 60.0)
    assert len(goals(EAGLE, ours)) == 2 and goals(replace(EAGLE, metrics=silent), ours) == []


def test_the_newest_row_counts_and_failed_arms_are_left_out():
    old = row("plain", 1, 50.0, None, None)
    failed = row("plain", 2, 50.0, None, None, metrics={}, error="not run: out of time")
    text = summary([old, row("plain", 1, 60.0, None, None), failed])
    assert text.splitlines()[2:] == ["| plain | 1 |  |  | 8.00 | 60 | 17 |"]
