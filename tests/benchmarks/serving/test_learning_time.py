"""What learning takes of the host: a row a way and load, of steps that a learner has learnt from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving import learning_time
from benchmarks.serving.learning_time import main, outcomes
from c2t_plugin.planner.calibration import Calibration


def test_outcomes_are_those_of_chains() -> None:
    stats, verified, accepted = outcomes(64, torch.Generator().manual_seed(1))
    assert stats.shape == (64, 6, 3) and verified.tolist() == [6] * 64
    assert 0 < float(accepted.float().mean()) < 6 and (stats[..., 0] <= 0).all()


def test_a_row_for_each_way_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_time, "STEPS", 40)
    monkeypatch.setattr(learning_time, "REST_S", 0.001)
    fits, threads = list[int](), torch.get_num_threads()
    fit = Calibration._fit
    monkeypatch.setattr(Calibration, "_fit", lambda self: (fits.append(1), fit(self))[1])
    try:
        assert main(["--requests", "16", "64", "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = read_rows(tmp_path / "rows.jsonl", BenchRow)
    assert [(row.arm, row.setting["concurrency"]) for row in rows] == [
        (arm, load) for arm in ("calibrate", "network") for load in (16, 64)
    ]
    assert fits and all(0 < row.metrics["learning_ms"] <= row.metrics["learning_p99_ms"] for row in rows)
    assert all(row.metrics["fit_ms"] > 0 for row in rows)
    assert [row.metrics.get("minibatch_ms", 0.0) > 0 for row in rows] == [False, False, True, True]
