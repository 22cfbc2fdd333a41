"""The benchmarks against real servers of each engine: arms run, counts are real, outputs are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving import breakdown, throughput
from benchmarks.serving.spans import PHASES
from tests.support.engines.bench_rows import check_plain_and_cut

pytestmark = pytest.mark.server

# so many tokens that a busy machine sees both requests run before they have ended
SMALL = ("--max-tokens", "128", "--concurrency", "2", "--temperature", "0", "--repeats", "2", "--cpu")


@pytest.fixture
def vllm() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed in this environment")


def run(out: Path, *options: str) -> tuple[int, dict[str, BenchRow]]:
    status = throughput.main([*SMALL, "--out", str(out), *options])
    return status, {row.arm: row for row in read_rows(out / "rows.jsonl", BenchRow)}


@pytest.mark.sglang
def test_arms_run_and_one_that_the_engine_does_not_know_is_marked(tmp_path: Path):
    arms = ["--arms", "plain", "C2T", "SGLang adaptive", "--base", "standalone", "--beta", "0.3"]
    status, rows = run(tmp_path, "--scenario", "pair-arithmetic", "--prompts", "12", *arms)
    assert status == 1 and "adaptive" in rows["SGLang adaptive"].error.lower()
    check_plain_and_cut(rows["plain"], rows["C2T"], together=2)


@pytest.mark.sglang
def test_sglangs_own_adaptive_mode_runs(tmp_path: Path):
    arms = ["--arms", "plain", "SGLang adaptive", "--base", "eagle3"]
    status, rows = run(tmp_path, "--scenario", "pair-held-out", "--prompts", "8", *arms)
    assert status == 0
    check_plain_and_cut(rows["plain"], rows["SGLang adaptive"], together=2)
    (log,) = tmp_path.glob("*adaptive*.log")
    changes = re.findall(r"Switch adaptive runtime state: steps (\d) -> (\d)", log.read_text(errors="replace"))
    assert changes, "its depth never changed"


@pytest.mark.sglang
def test_a_steps_time_is_found_in_the_engines_own_trace(tmp_path: Path):
    options = ["--arms", "C2T", "--concurrency", "2", "--steps", "4", "--cpu", "--out", str(tmp_path)]
    assert breakdown.main(options) == 0
    (row,) = read_rows(tmp_path / "rows.jsonl", BenchRow)
    assert row.kind == "functional"
    assert row.metrics["steps"] == 4
    assert {phase for phase in PHASES if not row.metrics[f"{phase}_ms"]} <= {"rerank"}


@pytest.mark.vllm
def test_arms_of_vllm_run_and_one_that_a_cpu_has_not_is_marked(tmp_path: Path, vllm: None):
    arms = ["--engine", "vllm", "--arms", "plain", "C2T", "vLLM adaptive", "--beta", "0.3"]
    status, rows = run(tmp_path, "--scenario", "pair-arithmetic", "--prompts", "12", *arms)
    assert status == 1
    refused = "Value error, Model Runner V1 does not support: adaptive draft verification"
    assert rows["vLLM adaptive"].error == f"the server did not start: {refused}"
    check_plain_and_cut(rows["plain"], rows["C2T"], together=2)
