"""The throughput benchmark and the breakdown against real servers: arms run, counts are real, outputs are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.report.rows import BenchRow, read_rows  # noqa: E402
from benchmarks.serving import (  # noqa: E402
    breakdown,
    throughput,
)
from benchmarks.serving.spans import PHASES  # noqa: E402
from tests.support.engines.bench_rows import check_plain_and_cut  # noqa: E402


def test_arms_run_and_one_that_the_engine_does_not_know_is_marked(tmp_path: Path):
    small = ["--prompts", "12", "--max-tokens", "64", "--concurrency", "2", "--temperature", "0", "--repeats", "2"]
    arms = ["--arms", "plain", "C2T", "SGLang adaptive"]
    options = ["--cpu", "--base", "standalone", "--beta", "0.3", "--out", str(tmp_path)]
    assert throughput.main(["--scenario", "pair-arithmetic", *small, *arms, *options]) == 1
    rows = {row.arm: row for row in read_rows(tmp_path / "rows.jsonl", BenchRow)}
    assert "adaptive" in rows["SGLang adaptive"].error.lower()
    check_plain_and_cut(rows["plain"], rows["C2T"], together=2)


def test_sglangs_own_adaptive_mode_runs(tmp_path: Path):
    small = ["--prompts", "8", "--max-tokens", "64", "--concurrency", "2", "--temperature", "0", "--repeats", "2"]
    options = ["--arms", "plain", "SGLang adaptive", "--cpu", "--base", "eagle3", "--out", str(tmp_path)]
    assert throughput.main(["--scenario", "pair-held-out", *small, *options]) == 0
    rows = {row.arm: row for row in read_rows(tmp_path / "rows.jsonl", BenchRow)}
    check_plain_and_cut(rows["plain"], rows["SGLang adaptive"], together=2)
    (log,) = tmp_path.glob("*adaptive*.log")
    changes = re.findall(r"Switch adaptive runtime state: steps (\d) -> (\d)", log.read_text(errors="replace"))
    assert changes, "its depth never changed"


def test_a_steps_time_is_found_in_the_engines_own_trace(tmp_path: Path):
    options = ["--arms", "C2T", "--concurrency", "2", "--steps", "4", "--cpu", "--out", str(tmp_path)]
    assert breakdown.main(options) == 0
    (row,) = read_rows(tmp_path / "rows.jsonl", BenchRow)
    assert row.kind == "functional"
    assert row.metrics["steps"] == 4
    assert {phase for phase in PHASES if not row.metrics[f"{phase}_ms"]} <= {"rerank"}
