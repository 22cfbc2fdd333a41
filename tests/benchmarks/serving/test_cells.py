"""The matrix with servers that answer by rule: which rows, what is skipped, and what a server's death leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving import matrix
from benchmarks.serving import server as serving_server
from benchmarks.serving.arms import ARMS, PLANNED_WARM_UPS
from benchmarks.serving.cells import came, cell_of, classifier_shares, group
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.real_pair import BINDING, THREADS, ChatPrompts
from benchmarks.serving.scenarios import lengths_of
from tests.support.turns import HOST, Stage, StubServer, set_up

PROMPTS = ChatPrompts("development", [[number, 0] for number in range(20)], "d" * 64)
ARMS_MEASURED = ("plain", "static 2", "C2T auto")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return set_up(monkeypatch, matrix, tmp_path / "pair", PROMPTS)


def run(out: Path, *more: str) -> tuple[int, list[BenchRow]]:
    few = ["--concurrency", "1", "2", "--temperature", "0", "--passes", "2", "--arms", *ARMS_MEASURED]
    status = matrix.main([*few, "--out", str(out), *more])
    return status, read_rows(out / "rows.jsonl", BenchRow)


def test_every_cell_has_a_row_with_its_processor_and_a_ratio_to_plain(stage: Stage, tmp_path: Path) -> None:
    status, rows = run(tmp_path)
    assert status == 0
    assert {cell_of(row) for row in rows} == {(arm, (load, 0.0)) for arm in ARMS_MEASURED for load in (1, 2)}
    assert {row.kind for row in rows} == {"measured-cpu"} and {row.setting["threads"] for row in rows} == {2}
    found = {row.arm: row.metrics for row in rows if row.setting["concurrency"] == 2}
    assert found["plain"]["ratio_to_plain"] == 1.0 and found["C2T auto"]["ratio_to_plain"] == pytest.approx(2.0)
    assert found["C2T auto"]["ratio_to_plain_low"] == pytest.approx(2.0)
    assert found["static 2"]["identical_share"] == 1.0 and found["static 2"]["target_ms_128"] == 178.0
    assert found["C2T auto"]["classifier_share"] == pytest.approx(0.01)
    assert found["C2T auto"]["classifier_share_of_draft"] == pytest.approx(0.1)
    assert not any("classifier_share" in found[arm] for arm in ("plain", "static 2"))
    assert found["static 2"]["tau"] == 1.0 and found["static 2"]["gamma_per_token"] == 2.0


def test_shares_are_of_what_an_engine_counts() -> None:
    nothing = {"classifier_s": None}
    assert classifier_shares(nothing, nothing, 1.0) == {} == classifier_shares({}, {}, 1.0)
    assert classifier_shares({"classifier_s": 1.0}, {"classifier_s": 1.5}, 50.0) == {"classifier_share": 0.01}


def test_what_came_of_what_a_planner_expected_is_told_where_it_is_known() -> None:
    planner = {"came": {"tokens": 0.98, "seconds": None}, "unscored": 0.25}
    assert came({"planner": planner}) == {"tokens_per_expected": 0.98, "unscored_share": 0.25}
    assert came({}) == came({"planner": None}) == came({"planner": {"came": {"tokens": None}}}) == {}


def test_rounds_have_the_same_prompts_for_all_and_others_each(stage: Stage, tmp_path: Path) -> None:
    run(tmp_path, "--concurrency", "2")
    passes = [event for event in stage.events if event.startswith("run [0") or event.startswith("run [4")]
    assert passes == ["run [0, 1, 2, 3] 2 0"] * 3 + ["run [4, 5, 6, 7] 2 0"] * 3
    warmed = [event for event in stage.events if event.startswith("run [8")]
    assert warmed == ["run [8, 9] 2 0"] * (2 + PLANNED_WARM_UPS)


def test_answers_have_lengths_of_their_own_the_same_every_time(stage: Stage, tmp_path: Path) -> None:
    lengths = lengths_of(64)
    assert lengths == lengths_of(64) and len(set(lengths)) > 32
    assert min(lengths) >= 32 and max(lengths) <= 96
    assert abs(sum(lengths) / len(lengths) - 64) < 8
    assert set(lengths_of(1)) == {1}
    _, rows = run(tmp_path)
    assert stage.lengths == lengths
    assert {row.setting["ends"] for row in rows} == {"at lengths drawn between half and one and a half of max_tokens"}


def test_one_server_runs_at_a_time(stage: Stage, tmp_path: Path) -> None:
    run(tmp_path)
    running: set[str] = set()
    for event in stage.events:
        what, _, name = event.partition(" ")
        if what in ("start", "resume"):
            running.add(name)
        if what in ("halt", "end"):
            running.discard(name)
        if what == "run":
            assert len(running) == 1


def test_a_second_run_measures_only_what_is_missing(stage: Stage, tmp_path: Path) -> None:
    run(tmp_path)
    stage.events.clear()
    _, rows = run(tmp_path)
    assert len(rows) == 6 and not stage.events
    _, rows = run(tmp_path, "--arms", "plain", "static 2", "static 4")
    assert len(rows) == 8 and "start static-2" not in stage.events and "start static-4" in stage.events
    _, rows = run(tmp_path, "--max-tokens", "32")
    assert len(rows) == 14


def test_an_arm_that_does_not_start_has_an_error_in_each_of_its_cells(stage: Stage, tmp_path: Path) -> None:
    stage.refused = "EAGLE3"
    status, rows = run(tmp_path)
    errors = {row.arm: row.error for row in rows if row.error}
    assert status == 1 and len(rows) == 6
    assert errors == {"static 2": "the server did not start: ValueError: no such option"}


def test_a_server_that_dies_costs_its_cell_and_the_rest_goes_on(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.dead = {"static-2": 2}
    starts: list[Any] = []

    class Reborn(StubServer):
        def __enter__(self) -> StubServer:
            starts.append(self.name)
            if starts.count("static-2") > 1:
                stage.dead = {}
            return super().__enter__()

    monkeypatch.setattr(serving_server, "Server", Reborn)
    status, rows = run(tmp_path)
    assert status == 1 and len(rows) == 6
    (lost,) = [row for row in rows if row.error]
    assert cell_of(lost) == ("static 2", (1, 0.0))
    assert lost.error == "static 2: the server ended with -9 while it was wanted; its log"


def test_without_plain_decoding_nothing_is_measured(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.dead = {"plain": 1}
    status, rows = run(tmp_path)
    assert (status, rows) == (2, [])
    assert "matrix: plain: the server ended" in capsys.readouterr().err


def test_a_batch_that_never_filled_is_no_figure(stage: Stage, tmp_path: Path) -> None:
    stage.most_at_once = 1
    status, rows = run(tmp_path)
    assert status == 1 and {row.setting["concurrency"] for row in rows if row.error} == {2}


def test_plain_decoding_is_in_every_group() -> None:
    names = ["plain", "static 1", "static 2", "static 2", "C2T"]
    assert [arm.name for arm in group(names, 3)] == ["plain", "static 1", "static 2"]
    assert group(["C2T"], 6) == [ARMS["plain"], ARMS["C2T"]]
    assert group(["plain"], 6) == [ARMS["plain"]]


def test_two_servers_are_the_least(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--at-once", "1") == (2, [])
    assert "--at-once is 1" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ENGINES)
def test_the_real_pairs_servers_have_room_for_every_request(
    engine: str, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[str] = []
    monkeypatch.setattr(type(ENGINES[engine]), "layout", lambda self, pair, out: pair)
    monkeypatch.setattr(StubServer, "__enter__", lambda self: flags.append(self.base_url) or self)
    run(tmp_path, "--engine", engine, "--arms", "plain", "static 2", "--concurrency", "8")
    room = {
        "sglang": "--max-running-requests 8 --max-total-tokens 8192 --context-length 1024",
        "vllm": "--max-num-seqs 8 --max-model-len 1024 --kv-cache-memory-bytes 377487360",
    }
    assert len(flags) == 2 and all(each.startswith(room[engine]) for each in flags)


def test_servers_compute_with_the_threads_that_rows_tell_of(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(matrix, "measure_host", lambda target, threads: told.append(threads) or HOST)
    run(tmp_path, "--threads", "3")
    assert told == [3]
    assert os.environ[THREADS] == "3" and os.environ[BINDING] == "nobind"
