"""Long contexts and mixed answers that arrive by themselves: what is asked, what a row says, what a failure leaves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving import long_mixed
from benchmarks.serving.answers import Completion, Pass
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.open_loop import Mix, figures, grown, paired_tpot
from benchmarks.serving.real_pair import KV_BYTES, ChatPrompts, real_runner
from benchmarks.simulation.fleet.arrivals import PATTERNS
from c2t_plugin.errors import C2TError
from tests.support.turns import Stage, set_up

# chats of 5 to 24 tokens, each with tokens of its own
CHATS = [[100 * number + place for place in range(5 + number)] for number in range(20)]
PROMPTS = ChatPrompts("development", CHATS, "d" * 64)
SMALL = ["--contexts", "30", "60", "--outputs", "4", "8", "--rate", "1", "--seconds", "20"]
LIMIT_S = 0.2


@pytest.mark.parametrize("arrivals", PATTERNS)
def test_requests_have_the_lengths_that_are_asked_for(arrivals: str) -> None:
    mix = Mix((30, 60), (4, 8), arrivals, rate=5.0, seconds=60.0)
    asks = mix.asks(CHATS)
    assert asks == mix.asks(CHATS) and asks != Mix((30, 60), (4, 8), arrivals, 5.0, 60.0, seed=1).asks(CHATS)
    assert [ask.at for ask in asks] == sorted(ask.at for ask in asks) and asks[-1].at < 60.0
    assert {len(ask.prompt) for ask in asks} == set(range(30, 61))
    assert {ask.max_tokens for ask in asks} == {4, 5, 6, 7, 8}


@pytest.mark.parametrize("length", [1, 5, 24, 25, 100, 200])
def test_a_prompt_ends_with_a_whole_chat_behind_others(length: int) -> None:
    prompt = grown(CHATS, length, random.Random(length))
    assert len(prompt) == length
    last = CHATS[prompt[-1] // 100]
    assert prompt[-len(last) :] == last[-length:]


@pytest.mark.parametrize(
    "change",
    [{"contexts": (60, 30)}, {"outputs": (1, 8)}, {"arrivals": "never"}, {"rate": 0.0}, {"seconds": -1.0}],
    ids=lambda change: "-".join(change),
)
def test_a_mix_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(C2TError):
        Mix(**change)


def test_nobody_who_comes_is_an_error() -> None:
    with pytest.raises(C2TError, match="no request arrives"):
        Mix(rate=1e-9, seconds=1.0).asks(CHATS)


def answer(tokens: int, first_s: float, per_token_s: float, first: int = 0) -> Completion:
    return Completion((first, *range(1, tokens)), 2, 1, 3, first_s, first_s + (tokens - 1) * per_token_s)


def test_a_row_says_what_came_in_time() -> None:
    plain = Pass((answer(11, 1.0, 0.2), answer(21, 3.0, 0.4), answer(1, 2.0, 0.0)), seconds=10.0)
    served = Pass((answer(11, 2.0, 0.1), answer(21, 4.0, 0.4), answer(1, 3.0, 0.0, first=7)), seconds=5.0)
    found = figures(served, plain, LIMIT_S, counted=True)
    assert found["output_tokens_per_s"] == pytest.approx(33 / 5)
    # an answer of one token has no time per token, and keeps the limit
    assert found["goodput_tokens_per_s"] == pytest.approx(12 / 5) and found["good_share"] == pytest.approx(2 / 3)
    assert (found["ttft_p50_ms"], found["tpot_p50_ms"]) == (pytest.approx(3000.0), pytest.approx(250.0))
    assert found["identical_share"] == pytest.approx(2 / 3)
    assert found["tpot_ratio_to_plain"] == pytest.approx(0.5**0.5)
    assert (found["tau"], found["gamma_per_token"]) == (0.5, 9 / 33)
    alone = figures(served, None, LIMIT_S, counted=False)
    assert alone["gamma_per_token"] is None and "identical_share" not in alone and "tpot_ratio_to_plain" not in alone


def test_bounds_are_of_the_ratios_of_the_same_requests() -> None:
    one, other = ([answer(5, 1.0, each) for each in times] for times in ((0.1, 0.2, 0.4), (0.2, 0.4, 0.8)))
    found = paired_tpot(one, other)
    assert all(value == pytest.approx(0.5) for value in found.values()) and len(found) == 3
    assert len(paired_tpot(one[:1], other[:1])) == 1 and paired_tpot([answer(1, 1.0, 0.0)], other[:1]) == {}


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return set_up(monkeypatch, long_mixed, tmp_path / "pair", PROMPTS)


def run(out: Path, *more: str) -> tuple[int, dict[str, BenchRow]]:
    status = long_mixed.main([*SMALL, "--out", str(out), *more])
    return status, {row.arm: row for row in read_rows(out / "rows.jsonl", BenchRow)}


def test_every_arm_gets_the_same_requests_and_a_row(stage: Stage, tmp_path: Path) -> None:
    status, rows = run(tmp_path)
    assert status == 0
    assert list(rows) == ["plain", "static 2", "static 4", "SGLang adaptive", "C2T"]
    asked = [event for event in stage.events if event.startswith("arrive")]
    assert len(asked) == 5 and len(set(asked)) == 1
    assert {row.kind for row in rows.values()} == {"measured-cpu"} and not any(row.error for row in rows.values())
    setting = rows["C2T"].setting
    assert (setting["contexts"], setting["arrivals"], setting["rate"]) == ("30 to 60", "poisson", 1.0)
    assert rows["plain"].metrics["output_tokens_per_s"] * 2 == rows["C2T"].metrics["output_tokens_per_s"]
    assert rows["C2T"].metrics["target_ms_128"] == 178.0 and rows["SGLang adaptive"].metrics["gamma_per_token"] is None


def test_plain_decoding_starts_beside_the_arms_that_are_asked_for(stage: Stage, tmp_path: Path) -> None:
    run(tmp_path, "--arms", "static 2")
    assert [event for event in stage.events if event.startswith("start")] == ["start plain", "start static-2"]


@pytest.mark.parametrize(("engine", "length", "room"), [("sglang", "--context-length", "--max-total-tokens")])
def test_a_server_has_room_for_the_longest_request(engine: str, length: str, room: str, tmp_path: Path) -> None:
    runner = real_runner(ENGINES[engine], tmp_path / "pair", tmp_path, 8, context=5000, tokens=9000)
    flags = dict(zip(runner.flags, runner.flags[1:], strict=False))
    assert (flags[length], flags[room]) == ("5000", "9000")


def test_vllm_has_room_for_one_request_and_its_draft(tmp_path: Path) -> None:
    runner = real_runner(ENGINES["vllm"], tmp_path / "pair", tmp_path, 1)
    flags = dict(zip(runner.flags, runner.flags[1:], strict=False))
    # the draft's one layer beside the target's 30, and half a block that is not full
    assert int(flags["--kv-cache-memory-bytes"]) > 31 / 30 * (int(flags["--max-model-len"]) + 64) * KV_BYTES


def test_an_arm_that_fails_costs_its_row_alone(stage: Stage, tmp_path: Path) -> None:
    stage.refused = "--speculative-adaptive"
    stage.dead = {"static-4": 0}
    status, rows = run(tmp_path)
    assert status == 1
    assert "no such option" in rows["SGLang adaptive"].error and "ended with -9" in rows["static 4"].error
    assert not rows["C2T"].error and "\n" not in rows["static 4"].error


def test_without_plain_decoding_there_are_no_rows(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.dead = {"plain": 0}
    assert run(tmp_path) == (2, {})
    assert "plain: the server ended with -9" in capsys.readouterr().err


def test_a_client_that_is_too_slow_measures_nothing(stage: Stage, tmp_path: Path) -> None:
    stage.client_share = 0.95
    assert run(tmp_path) == (2, {})


def test_an_arm_that_there_is_not_is_refused(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--arms", "C3T") == (2, {})
    assert "got C3T" in capsys.readouterr().err and not stage.events
