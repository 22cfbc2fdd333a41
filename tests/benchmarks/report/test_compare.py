"""Rows are compared only where machine, versions, scenario, arm and setting are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import compare
from benchmarks.report.rows import BenchRow, append_rows
from c2t_plugin.errors import C2TError

RUN = {
    "command": "x",
    "git_sha": "0" * 40,
    "dirty": False,
    "versions": {"python": "3.11.7", "sglang": "0.5.23", "c2t-plugin": "1"},
    "machine": "a CPU, no GPU",
    "seed": 0,
    "utc": "2026-01-02T03:04:05+00:00",
}


def row(speed: float | None = 100.0, arm: str = "plain", concurrency: int = 1, **run: Any) -> BenchRow:
    metrics = {} if speed is None else {"output_tokens_per_s": speed, "tau": 0.0}
    error = "no server" if speed is None else ""
    return BenchRow("chat", "functional", arm, {"concurrency": concurrency}, metrics, error, {**RUN, **run})


def test_the_newest_row_of_each_kind_is_compared():
    later = "2026-01-03T03:04:05+00:00"
    ((old, new),) = compare.compared([row(90.0, utc=later), row(50.0)], [row(120.0), row(1.0, concurrency=8)])
    assert compare.ratios(old, new) == {"output_tokens_per_s": pytest.approx(120 / 90)}


@pytest.mark.parametrize(
    "other",
    [{"machine": "another CPU, no GPU"}, {"versions": {**RUN["versions"], "sglang": "0.5.17"}}],  # type: ignore[dict-item]
    ids=["machine", "version"],
)
def test_rows_of_another_machine_or_version_are_refused(other: dict[str, Any]):
    with pytest.raises(C2TError, match="cannot be compared"):
        compare.compared([row()], [row(**other)])


def test_our_own_version_may_differ():
    versions = {"python": "3.11.7", "sglang": "0.5.23", "c2t-plugin": "2"}
    assert compare.compared([row()], [row(versions=versions)])


@pytest.mark.parametrize("new", [row(arm="static 4"), row(concurrency=2)], ids=["arm", "setting"])
def test_rows_of_nothing_in_common_are_refused(new: BenchRow):
    with pytest.raises(C2TError, match="in both"):
        compare.compared([row()], [new])


def test_a_failed_arm_has_no_ratio():
    ((old, new),) = compare.compared([row()], [row(None)])
    assert compare.ratios(old, new) == {}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    append_rows(tmp_path / "old", [row()])
    append_rows(tmp_path / "new", [row(150.0)])
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "1.500" in capsys.readouterr().out
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
