"""Arms by turns on a GPU, with servers that answer by rule: rows, what is told beside them, and how a GPU is shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import matrix
from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving.real_pair import ChatPrompts
from tests.support.turns import Stage, set_up

PROMPTS = ChatPrompts("development", [[number, 0] for number in range(20)], "d" * 64)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    monkeypatch.setattr(matrix, "build", lambda *given: None)
    return set_up(monkeypatch, matrix, tmp_path / "pair", PROMPTS)


def flags_of(tmp_path: Path, *more: str) -> tuple[list[str], dict[str, str]]:
    options = matrix._parser().parse_args(["--out", str(tmp_path), "--models", str(tmp_path), *more])
    runner = matrix.runner_of(options, tmp_path / "scratch")
    return list(runner.flags), dict(runner.environment or {})


def test_a_row_for_each_arm_and_load_and_what_c2t_says_of_itself(stage: Stage, tmp_path: Path) -> None:
    few = ["--arms", "plain", "C2T as it comes", "--concurrency", "1", "2", "--passes", "2", "--least", "2"]
    (tmp_path / "models").mkdir()
    given = ["--out", str(tmp_path), "--models", str(tmp_path / "models"), "--dry-run", *few]
    assert matrix.main(given) == 0
    rows = read_rows(tmp_path / "rows.jsonl", BenchRow)
    assert [(row.arm, row.setting["concurrency"]) for row in rows] == [
        *(("plain", 1), ("C2T as it comes", 1), ("plain", 2), ("C2T as it comes", 2))
    ]
    assert {(row.scenario, row.kind, row.setting["servers_at_once"]) for row in rows} == {
        ("gpu-matrix", "functional", 2)
    }
    assert all("target_ms_1" not in row.metrics for row in rows)
    states = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    assert [(each["arm"], each["condition"][0]) for each in states] == [("C2T as it comes", 1), ("C2T as it comes", 2)]


def test_servers_share_a_gpu_and_capture_graphs_up_to_the_largest_load(tmp_path: Path) -> None:
    flags, environment = flags_of(tmp_path, "--concurrency", "1", "8", "--tokens", "5000")
    said = " ".join(flags)
    assert "--cuda-graph-bs-decode 1 2 4 8 --max-running-requests 8 --max-total-tokens 5000" in said
    # the last one counts: FLAGS have another
    assert flags[len(flags) - flags[::-1].index("--mem-fraction-static")] == matrix.MEMORY
    assert "--attention-backend triton" in said and "SGLANG_FLASHINFER_USE_PAGED" not in environment
    flags, environment = flags_of(tmp_path / "f", "--concurrency", "1", "--attention", "flashinfer")
    assert flags[len(flags) - flags[::-1].index("--attention-backend")] == "flashinfer"
    assert environment["SGLANG_FLASHINFER_USE_PAGED"] == "1"
