"""The ladder of the GPU run, dry: every rung holds on the CPU engine. Trees are in the file of the serving part, which
runs beside this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.gpu.command import SERVERS
from benchmarks.gpu.ladder import ROWS, main
from benchmarks.report.rows import BenchRow, read_rows
from tests.support.sglang import faults, writes_often


def climb(part: str, out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, BenchRow]:
    """The rows of a part of the GPU run, each of which holds."""
    _, *rungs = SERVERS[part]
    assert main(["--out", str(out), "--dry-run", *rungs]) == 0, capsys.readouterr().out
    rows = read_rows(out / ROWS, BenchRow)
    assert {row.kind for row in rows} == {"functional"} and not any(row.error for row in rows)
    assert {row.arm.split()[0] for row in rows} == set(rungs[1:])
    return {row.arm: row for row in rows}


@pytest.mark.server
@pytest.mark.slow
def test_every_rung_of_chains_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "plugin").mkdir()
    plugin = str(faults.install(tmp_path / "plugin", writes_often.__file__))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [plugin, os.environ.get("PYTHONPATH")])))
    rows = climb("ladder", tmp_path, capsys)
    assert "planted: recorded" in (tmp_path / "ladder-rough.log").read_text(errors="replace")
    greedy = rows["R9 greedy"].metrics
    assert greedy["identical"] == greedy["prompts"]
    for server in ("kept", "rough"):
        # with float32 on both sides nothing is rounded so much
        assert rows["R4 recomputed"].metrics[f"off_{server}"] == 0
        assert (rows["R4 recomputed"].metrics[f"largest_difference_{server}"] or 0.0) < 1e-3
