"""The ladder of the GPU run, dry: every rung holds on the CPU engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_ladder import ROWS, main
from benchmarks.gpu_rungs import RUNGS
from benchmarks.record import BenchRow, read_rows


@pytest.mark.server
@pytest.mark.slow
def test_every_rung_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--out", str(tmp_path), "--dry-run"]) == 0, capsys.readouterr().out
    rows = read_rows(tmp_path / ROWS, BenchRow)
    assert [row.arm for row in rows] == list(RUNGS)
    assert {row.kind for row in rows} == {"functional"}
    greedy = next(row for row in rows if row.arm == "R9 greedy")
    assert greedy.metrics["identical"] == greedy.metrics["prompts"]
    recomputed = next(row for row in rows if row.arm == "R4 recomputed").metrics
    for server in ("kept", "rough"):
        # with float32 on both sides nothing is rounded so much
        assert recomputed[f"off_{server}"] == 0
        assert recomputed[f"largest_difference_{server}"] < 1e-3
