"""A load that swings within a run: what every arm is sent, what a row says, and what a server's death leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving import swinging
from benchmarks.serving.answers import Completion, Pass
from benchmarks.serving.real_pair import ChatPrompts
from benchmarks.serving.swinging import joined
from tests.support.turns import Stage, set_up

PROMPTS = ChatPrompts("development", [[number, 0] for number in range(40)], "d" * 64)
SMALL = ["--loads", "1", "4", "2", "--rounds", "2", "--least", "2", "--slots", "1"]
NAMES = ["plain", "static 2", "static 4", "SGLang adaptive", "C2T"]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return set_up(monkeypatch, swinging, tmp_path / "pair", PROMPTS)


def run(out: Path, *more: str) -> tuple[int, dict[str, BenchRow]]:
    status = swinging.main([*SMALL, "--out", str(out), *more])
    path = out / "rows.jsonl"
    return status, {row.arm: row for row in read_rows(path, BenchRow)} if path.exists() else {}


def sent(stage: Stage, arm: str) -> list[str]:
    """Passes of one arm, in their order."""
    found, mine = [], False
    for event in stage.events:
        if event.startswith(("resume", "halt")):
            mine = event == f"resume {arm.replace(' ', '-')}"
        elif mine and event.startswith("run"):
            found.append(event)
    return found


def test_every_load_is_a_part_of_each_round_in_its_order(stage: Stage, tmp_path: Path) -> None:
    status, rows = run(tmp_path)
    assert status == 0 and list(rows) == NAMES
    rounds = [event for event in sent(stage, "plain") if "run [3" not in event]
    assert rounds == [
        *("run [0, 1] 1 0", "run [4, 5, 6, 7] 4 0", "run [4, 5] 2 0"),
        *("run [6, 7] 1 0", "run [16, 17, 18, 19] 4 0", "run [10, 11] 2 0"),
    ]
    assert all(sent(stage, name)[-3:] in (rounds[:3], rounds[3:]) for name in NAMES)


def test_a_row_is_of_all_loads_together(stage: Stage, tmp_path: Path) -> None:
    _, rows = run(tmp_path)
    row = rows["C2T"]
    assert (row.scenario, row.kind, row.setting["loads"]) == ("swinging-load", "measured-cpu", "1, 4, 2")
    assert "concurrency" not in row.setting and row.setting["threads"] == 2
    # eight answers of three tokens in three passes of half a second
    assert row.metrics["output_tokens_per_s"] == pytest.approx(16.0)
    assert row.metrics["ratio_to_plain"] == pytest.approx(2.0) and row.metrics["passes"] == 2
    assert row.metrics["identical_share"] == 1.0


def test_passes_are_joined_by_what_they_are() -> None:
    answer = Completion((1, 2), 1, 1, 2, 0.1, 0.2)
    found = joined([Pass((answer,), 1.0, 2, 1.0, 0.1, 0.3), Pass((answer, answer), 3.0, 5, 3.0, 0.2, 0.1)])
    assert found == Pass((answer,) * 3, 4.0, 5, 2.5, 0.2, 0.3)


def test_an_arm_that_dies_says_so_and_the_others_go_on(stage: Stage, tmp_path: Path) -> None:
    stage.dead["static-2"], stage.refused = 2, "ADAPTIVE"
    status, rows = run(tmp_path)
    assert status == 1
    assert "ended with -9" in rows["static 2"].error and rows["C2T"].metrics["passes"] == 2


def test_without_plain_decoding_there_is_nothing_to_compare_with(stage: Stage, tmp_path: Path, capsys) -> None:
    stage.dead["plain"] = 1
    assert run(tmp_path)[0] == 2
    assert "plain: the server ended" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--rounds", "--slots", "--least", "--loads"])
def test_a_load_of_nobody_is_refused(stage: Stage, tmp_path: Path, flag: str, capsys) -> None:
    assert run(tmp_path, flag, "0")[0] == 2
    assert "1 or more" in capsys.readouterr().err and not stage.events
