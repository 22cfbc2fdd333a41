"""The GPU run's serving part and the ladder's rungs of trees, dry: real servers on the CPU engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.contests import DRY_ARMS
from benchmarks.gpu.serving import ROWS, main
from benchmarks.report.rows import BenchRow, read_rows
from tests.benchmarks.gpu.test_ladder_dry import climb


@pytest.mark.server
@pytest.mark.slow
def test_a_tiny_inflated_pair_is_served_plain_static_and_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--out", str(tmp_path), "--dry-run"]) == 0, capsys.readouterr().out
    rows = read_rows(tmp_path / ROWS, BenchRow)
    outputs = {row.arm: row.metrics for row in rows if row.setting["check"] == "outputs"}
    betas = sum(len(arm.betas) for arm in DRY_ARMS)
    assert len(outputs) == betas and all(metrics["identical_share"] == 1 for metrics in outputs.values())
    static, uncut = outputs["static 4"], outputs["c2t, at most 4, beta 0"]
    assert static["verify_steps"] == uncut["verify_steps"]
    # the head drafts as the small pair's: more than two tokens of four, on these prompts
    assert static["tau"] is not None and static["tau"] > 2
    # How many requests ran at once depends on the machine, so only that each arm was driven is asked here.
    assert {row.arm for row in rows if row.setting["check"] == "throughput"} == set(outputs)


@pytest.mark.server
@pytest.mark.slow
def test_every_rung_of_trees_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    greedy = climb("ladder-trees", tmp_path, capsys)["R14 greedy"].metrics
    assert greedy["identical"] == greedy["prompts"]
