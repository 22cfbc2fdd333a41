"""The throughput benchmark against vLLM's servers: arms run, counts are real, outputs are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.report.rows import BenchRow, read_rows  # noqa: E402
from benchmarks.serving import throughput  # noqa: E402
from tests.support.engines.bench_rows import check_plain_and_cut  # noqa: E402


def test_arms_run_and_one_that_a_cpu_has_not_is_marked(tmp_path: Path):
    small = ["--prompts", "12", "--max-tokens", "64", "--concurrency", "2", "--temperature", "0", "--repeats", "2"]
    options = ["--engine", "vllm", "--cpu", "--beta", "0.3", "--out", str(tmp_path)]
    arms = ["--arms", "plain", "C2T", "vLLM adaptive"]
    assert throughput.main(["--scenario", "pair-arithmetic", *small, *options, *arms]) == 1
    rows = {row.arm: row for row in read_rows(tmp_path / "rows.jsonl", BenchRow)}
    refused = "Value error, Model Runner V1 does not support: adaptive draft verification"
    assert rows["vLLM adaptive"].error == f"the server did not start: {refused}"
    check_plain_and_cut(rows["plain"], rows["C2T"], together=2)
