"""The demo on the real pair with servers that answer by rule: what it measures, prints and makes of differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving import demo
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.real_demo import CONTESTANTS, prompts_of_a_pass
from benchmarks.serving.real_pair import ChatPrompts
from benchmarks.serving.streamed import spans
from tests.support.turns import Stage, set_up

PROMPTS = ChatPrompts("development", [[number, 0] for number in range(100)], "d" * 64)


class Words:
    """A tokenizer whose token n is the letter of that number; 12 and 13 are one character together."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        letters = "".join("" if token == 12 else chr(ord("a") + token - 11) for token in ids)
        return letters + "\N{REPLACEMENT CHARACTER}" if ids[-1] == 12 else letters


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    for engine in ENGINES.values():
        monkeypatch.setattr(type(engine), "layout", lambda self, pair, out: pair)
    monkeypatch.setattr(demo, "question", lambda target: [1, 2])
    monkeypatch.setattr("benchmarks.serving.streamed.tokenizer", lambda target: Words())
    return set_up(monkeypatch, demo, tmp_path / "pair", PROMPTS)


def run(out: Path, *more: str) -> tuple[int, list[BenchRow]]:
    status = demo.main(["--out", str(out), "--passes", "2", *more])
    return status, read_rows(out / "rows.jsonl", BenchRow)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_arm_has_a_row_at_every_concurrency(engine: str, stage: Stage, tmp_path: Path) -> None:
    status, rows = run(tmp_path, "--engine", engine)
    assert status == 0
    found = [(row.setting["concurrency"], row.arm) for row in rows]
    assert found == [(load, arm) for load in (1, 4, 16) for arm in CONTESTANTS[engine]]
    assert all(row.metrics["passes"] == 2 and row.metrics["identical_share"] == 1.0 for row in rows)
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")


def test_what_it_prints(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    text = capsys.readouterr().out
    assert "measured, on this a CPU, threads: 2" in text and "10.0 GB/s" in text
    line = next(line for line in text.splitlines() if line.startswith("│ 16") and "static 4" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["16", "static 4", "192.0 (192.0 to 192.0)", "2.00 (2.00 to 2.00)", "2.00", "2.00", "64 of 64"]
    assert "a[c]d[e]f" in text.replace("\n", "") and "3 of 6 tokens came from the draft" in text


@pytest.mark.parametrize("engine", ENGINES)
def test_c2t_gets_no_options_of_its_own_but_its_files(engine: str) -> None:
    arm = CONTESTANTS[engine]["C2T"]
    filled: Any = type("On", (), {"draft": "draft", "method": "eagle3", "d_max": 6, "classifier": "file"})()
    expected = {
        "sglang": {"algorithm": "C2T", "draft_model_path": "draft"},
        # vLLM has to be told of a length, and would load a classifier beside the draft as part of it
        "vllm": {"method": "c2t:eagle3", "model": "draft", "num_speculative_tokens": 6, "c2t_classifier": "file"},
    }
    assert dict(arm.options(engine, filled)) == expected[engine] and arm.planned


def test_arms_change_places_and_rounds_their_prompts(stage: Stage, tmp_path: Path) -> None:
    run(tmp_path, "--concurrency", "4")
    turns = [event.partition(" ")[2] for event in stage.events if event.startswith("resume")]
    # each was let go on once to warm up; at the end plain is asked and C2T streams, then all are let go on to end
    rounds = turns[5:15]
    assert rounds[:5] == rounds[5:][::-1] and len(set(rounds[:5])) == 5
    first, second = (f"run {list(range(start, start + 8))} 4 0" for start in (0, 8))
    assert [event for event in stage.events if event in (first, second)] == [first] * 5 + [second] * 5


def test_only_an_arm_that_plans_has_passes_before(stage: Stage, tmp_path: Path) -> None:
    run(tmp_path, "--concurrency", "4")
    last = f"run {list(range(92, 100))} 4 0"
    assert stage.events.count(last) == 1
    assert stage.events.index(last) > stage.events.index("start C2T")


def test_a_tie_is_shown_and_is_no_failure(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage.odd, stage.gap = 1, 0.0002
    status, rows = run(tmp_path, "--concurrency", "4")
    text = capsys.readouterr().out
    assert status == 0 and "15 of 16" in text
    assert "an answer differs from token 3 on" in text and "are 0.00020 apart: a tie" in text
    # asked about the prompt and what both answers begin with
    assert "gap [1, 0, 1, 1]" in stage.events
    assert {row.metrics["identical_share"] for row in rows if row.arm != "plain"} == {15 / 16}


def test_a_difference_that_is_no_tie_fails_the_demo(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.odd, stage.gap = 1, 0.4
    assert run(tmp_path)[0] == 1
    assert "are 0.40000 apart: not a tie" in capsys.readouterr().out


@pytest.mark.parametrize(("refused", "status"), [("adaptive", 0), ("C2T", 1)])
def test_an_arm_that_does_not_start_is_a_line(
    refused: str, status: int, stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.refused = refused
    found, rows = run(tmp_path)
    assert found == status and len(rows) == 12
    assert ": the server did not start: ValueError: no such option" in capsys.readouterr().out


def test_a_server_that_dies_ends_the_demo_in_one_message(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.dead = {"static-2": 2}
    assert run(tmp_path) == (2, [])
    assert "static 2: the server ended with -9" in capsys.readouterr().out


def test_no_round_begins_that_would_end_too_late(stage: Stage, tmp_path: Path) -> None:
    _, rows = run(tmp_path, "--passes", "4", "--least", "1", "--minutes", "0")
    assert {row.metrics["passes"] for row in rows} == {1}


def test_most_of_a_pass_is_not_its_end() -> None:
    assert [prompts_of_a_pass(load) for load in (1, 4, 16, 7)] == [2, 8, 32, 14]


def test_the_last_token_of_a_piece_is_the_targets_own() -> None:
    found = list(spans([(11,), (14, 15, 16), (17,), (18, 19)], Words()))
    assert found == [("a", False), ("de", True), ("f", False), ("g", False), ("h", True), ("i", False)]


def test_a_character_waits_for_all_its_tokens() -> None:
    assert list(spans([(11, 12), (13, 14)], Words())) == [("a", True), ("c", True), ("d", False)]
