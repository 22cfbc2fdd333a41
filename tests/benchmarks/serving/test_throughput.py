"""The throughput benchmark with servers that answer by rule: which rows, which ratios, and what a failure leaves.

Longer than 300 lines because all of it follows the same stubs for servers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.pairs.toy import pair_dir
from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving import server as serving_server
from benchmarks.serving import throughput
from benchmarks.serving.arms import ARMS, chosen
from benchmarks.serving.client import Completion, Pass
from benchmarks.serving.engines import ENGINES, Launch
from benchmarks.serving.measuring import Outcome, measure, metrics_of, ratio
from benchmarks.serving.scenarios import SCENARIOS, Scenario, prompts_of
from c2t_plugin.errors import C2TError


class FakeServer:
    """Does not start where it is told so."""

    broken: ClassVar[str] = ""
    started: ClassVar[list[tuple[str, ...]]] = []

    def __init__(self, launch: Launch, *, log: Path, start_timeout: float) -> None:
        self.flags = launch.flags
        self.base_url = " ".join(launch.flags)

    def __enter__(self) -> FakeServer:
        self.started.append(self.flags)
        if self.broken and self.broken in self.flags:
            raise C2TError("the server did not start: ValueError: no such option\nmore of the log")
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class FakeClient:
    """Twice as fast with speculation; runs at most `limit` requests at once, and notes the size of every pass."""

    limit: ClassVar[int] = 99
    share: ClassVar[float] = 0.1
    waited: ClassVar[float] = 0.0
    counts: ClassVar[bool] = True
    passes: ClassVar[list[tuple[str, int, int]]] = []

    def __init__(self, url: str, max_tokens: int, whole: bool) -> None:
        self.url = url
        self.speculates = "--speculative" in url

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def complete(self, prompt: Sequence[int], temperature: float = 0.0) -> Completion:
        steps = 2 if self.speculates and self.counts else 0
        return Completion((1, 2, 3), steps, steps, 3 * steps, first_s=0.1, last_s=0.3)

    def run(
        self, prompts: Sequence[Sequence[int]], concurrency: int, advance: Callable[[], None], temperature: float
    ) -> Pass:
        self.passes.append((self.url, len(prompts), concurrency))
        together = min(concurrency, self.limit, len(prompts))
        completions = tuple(map(self.complete, prompts))
        return Pass(completions, 0.5 if self.speculates else 1.0, together, together - 0.5, self.share, self.waited)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> type[FakeServer]:
    monkeypatch.setattr(serving_server, "Server", FakeServer)
    for engine in ENGINES.values():
        monkeypatch.setattr(type(engine), "client", FakeClient)
    monkeypatch.setattr(FakeServer, "started", [])
    monkeypatch.setattr(FakeClient, "passes", [])
    return FakeServer


def run(out: Path, *more: str) -> tuple[int, list[BenchRow]]:
    few = ["--prompts", "4", "--concurrency", "1", "2", "--temperature", "0", "--repeats", "2"]
    status = throughput.main(["--scenario", "pair-held-out", "--cpu", "--out", str(out), *few, *more])
    return status, read_rows(out / "rows.jsonl", BenchRow)


def test_every_arm_runs_on_a_server_of_its_own(fakes: type[FakeServer], tmp_path: Path):
    status, rows = run(tmp_path)
    assert status == 0
    assert len(fakes.started) == len(chosen("sglang", None))
    assert {flags[:2] for flags in fakes.started} == {("--max-running-requests", "2")}
    arms = {row.arm: row for row in rows if row.setting["concurrency"] == 2}
    assert set(arms) == {arm.name for arm in chosen("sglang", None) if arm.concurrency is None}
    assert arms["plain"].metrics["tau"] is None
    assert arms["C2T"].metrics["ratio_to_plain"] == pytest.approx(2.0)
    assert arms["C2T"].metrics["ratio_to_best_static"] == pytest.approx(1.0)
    assert arms["C2T"].metrics["tau"] == 1.0
    assert arms["C2T"].metrics["tpot_p50_ms"] == pytest.approx(100.0)
    assert arms["C2T"].metrics["ttft_p50_ms"] == pytest.approx(100.0)
    assert arms["C2T"].metrics["identical_share"] == 1.0
    assert {row.kind for row in rows} == {"functional"}
    assert {row.setting["dtype"] for row in rows} == {"float32"}
    low, middle, high = (arms["C2T"].metrics[f"output_tokens_per_s_p{share}"] for share in (20, 50, 80))
    assert low <= arms["C2T"].metrics["output_tokens_per_s"] <= high and low <= middle <= high
    assert arms["C2T"].metrics["ran_at_once"] == 2 and arms["C2T"].metrics["mean_at_once"] == 1.5
    assert (arms["C2T"].metrics["warm_up"], arms["C2T auto"].metrics["warm_up"]) == (2, 6)
    assert arms["C2T"].metrics["requests"] == 4
    # SGLang's adaptive mode does not say how deep it drafted
    uncounted = {name for name, row in arms.items() if row.metrics["gamma_per_token"] is None}
    assert uncounted == {"SGLang adaptive"}


def test_vllm_runs_the_arms_that_it_has_and_names_those_that_it_has_not(fakes: type[FakeServer], tmp_path: Path):
    status, rows = run(tmp_path, "--engine", "vllm")
    assert status == 1
    absent = {arm.name: arm.absent("vllm") for arm in chosen("vllm", None) if arm.absent("vllm")}
    assert {row.arm for row in rows} == {arm.name for arm in chosen("vllm", None)}
    assert len(fakes.started) == len(chosen("vllm", None)) - len(absent) > 0
    assert {row.arm: row.error for row in rows if row.error} == {
        name: f"not supported: {why}" for name, why in absent.items()
    }
    assert {row.setting["engine"] for row in rows} == {"vllm"}


def test_an_interrupted_run_keeps_the_arms_that_it_finished(
    fakes: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(server: FakeServer) -> FakeServer:
        server.started.append(server.flags)
        if len(server.started) == 3:
            raise KeyboardInterrupt
        return server

    monkeypatch.setattr(fakes, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert {row.arm for row in read_rows(tmp_path / "rows.jsonl", BenchRow)} == {"plain", "static 1"}


def test_an_arm_that_does_not_start_is_a_row_and_the_others_go_on(
    fakes: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(fakes, "broken", "--speculative-adaptive")
    status, rows = run(tmp_path)
    failed = [row for row in rows if row.error]
    assert status == 1
    assert {row.arm for row in failed} == {"SGLang adaptive"}
    assert {row.error for row in failed} == {"the server did not start: ValueError: no such option"}
    assert len(fakes.started) == len(chosen("sglang", None))
    assert "no such option" in capsys.readouterr().out


def test_an_arm_for_other_drafts_is_marked_and_not_started(fakes: type[FakeServer], tmp_path: Path):
    _, rows = run(tmp_path, "--arms", "plain", "SGLang adaptive", "--base", "standalone")
    assert len(fakes.started) == 1
    assert {row.error for row in rows if row.error} == {
        "SGLang adaptive drafts with EAGLE or EAGLE3 only, not with STANDALONE"
    }


def test_a_batch_that_was_never_reached_is_no_measurement(
    fakes: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeClient, "limit", 1)
    _, rows = run(tmp_path, "--arms", "plain")
    assert [row.error[:30] for row in rows] == ["", "only 1 of 2 requests ever ran "]
    assert "raise the server's limit" in rows[1].error


def test_a_client_without_a_processor_is_named_as_the_reason_of_a_batch_that_was_not_reached(
    fakes: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeClient, "limit", 1)
    monkeypatch.setattr(FakeClient, "waited", 0.93)
    _, rows = run(tmp_path, "--arms", "plain")
    reason = "only 1 of 2 requests ever ran at once: the client waited for a processor 93% of the time"
    assert [row.error for row in rows] == ["", reason]
    assert rows[0].metrics["client_waited"] == 0.93


def test_a_set_that_is_smaller_than_the_batch_is_no_measurement_unless_the_paper_has_it_so(fakes: type[FakeServer]):
    """240 requests cannot fill 256 places; so many as there are must have run at once."""
    client = FakeClient("", 1, True)
    assert measure(client, [[1]] * 3, (8, 0.0), 1).error.startswith("3 requests cannot fill 8 places")  # type: ignore[arg-type]
    assert not measure(client, [[1]] * 3, (8, 0.0), 1, few=True).error  # type: ignore[arg-type]


def test_a_client_that_cannot_follow_is_no_measurement(
    fakes: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeClient, "share", 0.95)
    _, rows = run(tmp_path, "--arms", "plain")
    assert {row.error[:35] for row in rows} == {"the client took 95% of a processor,"}


def test_every_size_of_batch_is_warmed_up_and_the_planner_three_times(fakes: type[FakeServer], tmp_path: Path):
    run(tmp_path, "--arms", "C2T", "C2T auto")
    sizes = [
        [each[1:] for each in FakeClient.passes if ("--speculative-c2t-planner on" in each[0]) is auto]
        for auto in (False, True)
    ]
    measured = {each: [(4, each), (4, each)] for each in (1, 2)}
    assert sizes[0] == [(1, 1), *measured[1], (2, 2), *measured[2]]
    assert sizes[1] == [(1, 1)] * 3 + measured[1] + [(2, 2)] * 3 + measured[2]


def test_gamma_that_a_server_does_not_tell_is_left_out(
    fakes: type[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeClient, "counts", False)
    _, rows = run(tmp_path, "--arms", "plain", "C2T")
    assert {row.arm: row.metrics["gamma_per_token"] for row in rows} == {"plain": 0.0, "C2T": None}


def test_prompts_that_are_asked_for_are_all_that_is_sent():
    options = throughput._parser().parse_args(["--scenario", "gsm8k", "--prompts", "8"])
    scenario, _ = throughput._chosen(options)
    assert [scenario.requests(each) for each in scenario.concurrencies] == [8] * len(scenario.concurrencies)


def test_a_set_that_is_sent_twice_finds_no_prefixes(fakes: type[FakeServer], tmp_path: Path):
    for name in ENGINES:
        scenario = Scenario("twice", 8, (1,), own="held-out", each=1, repeat=2)
        options = ["--scenario", "pair-held-out", "--cpu", "--out", str(tmp_path), "--engine", name]
        contest = throughput._contest(throughput._parser().parse_args(options))
        with contest._served(scenario, ARMS["plain"]):
            pass
    assert ["--disable-radix-cache" in flags for flags in fakes.started] == [True, False]
    assert ["--no-enable-prefix-caching" in flags for flags in fakes.started] == [False, True]


def test_an_arm_without_a_condition_is_not_started(fakes: type[FakeServer], tmp_path: Path):
    run(tmp_path, "--arms", "plain", "EAGLE-2 tree", "--concurrency", "2")
    assert len(fakes.started) == 1


def test_a_running_server_is_the_only_arm(fakes: type[FakeServer], tmp_path: Path):
    status, rows = run(tmp_path, "--url", "http://somewhere", "--arms", "as deployed")
    assert status == 0 and not fakes.started
    assert {row.arm for row in rows} == {"as deployed"}
    assert {row.setting[name] for row in rows for name in ("base", "draft", "beta", "d_max", "dtype")} == {"as served"}


def test_rows_say_which_draft_and_flags_ran(fakes: type[FakeServer], tmp_path: Path):
    _, rows = run(tmp_path, "--arms", "plain", "--server-args", "--tp 2", "--classifier", "mine.safetensors")
    wanted = {"draft": "eagle3", "classifier": "mine.safetensors", "server_args": "--tp 2", "ends": "at max_tokens"}
    assert all(wanted.items() <= row.setting.items() for row in rows)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--arms", "fast"], "got fast"),
        (["--prompts", "100000"], "100000"),
        (["--scenario", "gsm8k"], "--data gsm8k=PATH"),
        (["--engine", "vllm", "--arms", "SGLang adaptive"], "got SGLang adaptive"),
    ],
)
def test_a_wrong_command_is_one_line(
    more: list[str], complaint: str, fakes: type[FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    status, rows = run(tmp_path, *more)
    error = capsys.readouterr().err
    assert (status, rows) == (2, [])
    assert complaint in error and error.count("\n") == 1


def passes(*seconds: float) -> Outcome:
    return Outcome([Pass((Completion((1,) * 10, 0, 0, 0),), each) for each in seconds])


def test_the_interval_holds_the_ratio_and_needs_two_passes_of_each():
    found = ratio("r", passes(1.0, 1.1, 0.9).speeds, passes(2.0, 2.2, 1.8).speeds)
    low, middle, high = (found[name] for name in ("r_low", "r", "r_high"))
    assert low is not None and middle is not None and high is not None
    assert low < middle < high and middle == pytest.approx(2.0, rel=0.01)
    assert set(ratio("r", [1.0], [2.0, 3.0])) == {"r"}


def test_the_best_static_chain_is_the_fastest_one():
    found = metrics_of(passes(1.0), passes(2.0), [passes(4.0), passes(0.5), Outcome(error="x")], greedy=False)
    assert found["ratio_to_best_static"] == pytest.approx(0.5)
    assert found["ratio_to_plain"] == pytest.approx(2.0)
    assert found["tpot_p50_ms"] == 0.0 and "identical_share" not in found


def test_scenarios_cover_what_the_papers_report():
    table3 = SCENARIOS["c2t-v2-table3"]
    assert (table3.prompts, table3.concurrencies, table3.d_max) == (240, (64, 128, 256), 4)
    assert (table3.each, table3.data, table3.arms) == (
        80,
        ("gsm8k", "alpaca", "cnn-dailymail"),
        ("plain", "static 4", "C2T"),
    )
    assert SCENARIOS["c2t-v2-table3-twice"].prompts == 480
    table2 = [scenario for name, scenario in SCENARIOS.items() if name.startswith("c2t-v2-table2-")]
    found = {(each.temperatures, each.concurrencies, each.d_max, each.arms, each.prompts) for each in table2}
    assert len(table2) == 6 and found == {((0.0,), (1,), 6, ("static 4", "C2T"), 80)}
    assert SCENARIOS["gsm8k"].concurrencies == (1, 4, 8, 32, 64, 128, 256)
    assert SCENARIOS["gsm8k"].temperatures == (0.0, 1.0)
    assert {scenario.whole for name, scenario in SCENARIOS.items() if name.startswith("c2t-v2")} == {False}
    # answers of a chat end by themselves, texts are continued
    assert (SCENARIOS["gsm8k"].whole, SCENARIOS["c4"].whole) == (False, True)
    assert [SCENARIOS["gsm8k"].requests(each) for each in (1, 32, 64, 256)] == [80, 80, 128, 512]
    assert [SCENARIOS["c2t-v2-table3"].requests(each) for each in (64, 256)] == [240, 240]
    assert (table3.few, SCENARIOS["gsm8k"].few) == (True, False)


def test_data_sets_are_mixed_in_turn(tmp_path: Path):
    """Through the tokenizer of the shipped target."""
    (tmp_path / "g.jsonl").write_text("".join(json.dumps({"question": f"q{i}"}) + "\n" for i in range(2)))
    (tmp_path / "h.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(2)))
    scenario = Scenario("mixed", 8, data=("gsm8k", "humaneval"), each=2, repeat=2)
    paths = {"gsm8k": tmp_path / "g.jsonl", "humaneval": tmp_path / "h.jsonl"}
    found = prompts_of(scenario, paths, pair_dir() / "target", pair_dir())
    assert len(found) == scenario.prompts == 8
    assert found[:4] == found[4:] and len({tuple(prompt) for prompt in found}) == 4


def test_a_larger_batch_takes_more_of_a_set_where_it_has_more(tmp_path: Path):
    (tmp_path / "g.jsonl").write_text("".join(json.dumps({"question": f"q{i}"}) + "\n" for i in range(5)))
    paths = {"gsm8k": tmp_path / "g.jsonl"}
    for largest, expected in ((1, 2), (2, 4), (8, 5)):
        scenario = Scenario("one", 8, (largest,), data=("gsm8k",), each=2, per_slot=2)
        assert len(prompts_of(scenario, paths, pair_dir() / "target", pair_dir())) == expected


def test_a_target_without_a_tokenizer_is_one_line(tmp_path: Path):
    (tmp_path / "g.jsonl").write_text(json.dumps({"question": "q"}) + "\n")
    with pytest.raises(C2TError, match="no tokenizer of a target"):
        prompts_of(Scenario("one", 8, data=("gsm8k",), each=1), {"gsm8k": tmp_path / "g.jsonl"}, tmp_path, pair_dir())


def test_an_arm_runs_under_its_own_flags_after_those_of_all_servers(fakes: type[FakeServer], tmp_path: Path):
    run(tmp_path, "--arms", "static 3", "--server-args", "--tp 2")
    (flags,) = fakes.started
    assert flags[2:4] == ("--tp", "2") and flags[flags.index("--speculative-num-steps") + 1] == "3"
