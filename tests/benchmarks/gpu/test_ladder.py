"""The ladder's verdicts: each rung holds on what a good server does, and falls on the fault that it is for. Its run:
when rows are written, and whose fault a failure is.

Longer than 300 lines, as both take the same good servers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("openai", reason="the servers' client is not installed in this environment")

from benchmarks.gpu import ladder as gpu_ladder
from benchmarks.gpu.command import SERVERS as SERVER_PARTS
from benchmarks.gpu.ladder import DRY, FULL, LOADS, MAX_TOKENS, ask, run
from benchmarks.gpu.rungs import NUMBERS, RUNGS, STEPS, TOPK, Found, p_value
from benchmarks.gpu.servers import GRAPHS, MOST, SERVERS
from benchmarks.report.recomputed import Comparison
from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving.client import Completion, Pass
from benchmarks.serving.process import ServerError
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

PROMPTS = 3
SAME = Comparison(states=100, off=2, largest_difference=1e-5)
RETRACTED = "Testing retraction. #retracted_reqs: 1, #new_tokens_gained: 40\n"


def answers(*, steps: int = 10, accepted: int = 29, candidates: int = 40, first: int = 7) -> Pass:
    one = Completion((first, *range(MAX_TOKENS - 1)), steps, accepted, candidates)
    return Pass((one,) * PROMPTS, 1.0)


class Recorded:
    """As far as the rung looks at traces."""

    def __init__(self, shift: float = 0.0, states: int = 6) -> None:
        values = torch.linspace(-3, 0, states * STEPS).view(states, STEPS) + shift
        self.chain = SimpleNamespace(joint_log_prob=values, log_prob=values, entropy=-values, margin=values)
        self.prompt, self.step = torch.arange(states) // 2, torch.arange(states) % 2

    def __len__(self) -> int:
        return len(self.prompt)


@pytest.fixture
def good() -> dict[str, Found]:
    samples = Counter({(1, 2): 500, (1, 3): 300, (2, 2): 200})
    found = {}
    for name in SERVERS:
        speculates = name != "plain"
        one = answers() if speculates else answers(steps=0, accepted=0, candidates=0)
        log = "C2T: configuration {}\n" if speculates else ""
        state = {"planner": {"active": True, "curve": True}, "depths": {"0": 3, "4": 5}} if speculates else None
        traces: Any = Recorded() if speculates else None
        found[name] = Found(one, one, samples, log, state=state, traces=traces, recomputed=SAME, gap_ms=0.02)
    found["rough"] = replace(found["rough"], aborted=2, log=found["rough"].log + RETRACTED)
    ends = {"uncut": answers(candidates=10 * STEPS), "nothing": answers(steps=MAX_TOKENS - 1, accepted=0, candidates=0)}
    found["kept"] = replace(found["kept"], **ends)
    for name in LOADS:
        found[name] = replace(found[name], loaded=(answers(), answers()))
    found["window"] = replace(found["window"], uncut=ends["uncut"])
    for name in ("tree", "padded tree"):
        found[name] = replace(found[name], uncut=answers(candidates=10 * STEPS * TOPK))
    return found


def test_every_rung_holds_on_good_servers(good: dict[str, Found]):
    assert {rung: judged(good, rung) for rung in RUNGS} == dict.fromkeys(RUNGS, "")


def judged(servers: dict[str, Found], rung: str) -> str:
    check, needs = RUNGS[rung]
    return check({name: servers[name] for name in needs})[1]


# rung: server with the fault, what is changed
FAULTS: dict[str, tuple[str, Callable[[Found], dict[str, Any]]]] = {
    "R1 configuration": ("window", lambda found: {"log": ""}),
    "R2 SGLang 31023, 31455": ("kept", lambda found: {"log": f"{found.log}CUDA error: an illegal memory access was"}),
    "R3 SGLang 34384": ("slots", lambda found: {"loaded": (answers(), answers(first=8))}),
    "R4 recomputed": ("rough", lambda found: {"recomputed": replace(SAME, off=3)}),
    "R6 graph and eager": ("eager", lambda found: {"traces": Recorded(shift=0.1)}),
    "R8 kept and window": ("kept", lambda found: {"uncut": answers(accepted=28, candidates=10 * STEPS)}),
    "R9 greedy": ("eager", lambda found: {"together": answers(first=8)}),
    "R9 sampled": ("auto", lambda found: {"samples": Counter({(1, 2): 400, (1, 3): 400, (2, 2): 200})}),
    "R10 gap": ("sync", lambda found: {"gap_ms": None}),
    "R12 planner": ("auto", lambda found: {"state": {**found.state, "planner": {"active": True, "curve": False}}}),  # type: ignore[dict-item]
    "R14 trees and pads": ("padded tree", lambda found: {"uncut": answers(candidates=10 * STEPS)}),
    "R14 greedy": ("tree", lambda found: {"alone": answers(first=8)}),
    "R14 sampled": ("padded tree", lambda found: {"samples": Counter({(1, 2): 400, (1, 3): 400, (2, 2): 200})}),
    "R16 both ends": ("kept", lambda found: {"nothing": answers(steps=MAX_TOKENS - 2)}),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_falls_on_its_fault(good: dict[str, Found], rung: str):
    name, fault = FAULTS[rung]
    good[name] = replace(good[name], **fault(good[name]))
    assert judged(good, rung)


def test_a_tree_that_is_not_whole_at_beta_0_is_said(good: dict[str, Found]):
    for name in ("tree", "padded tree"):
        good[name] = replace(good[name], uncut=answers(candidates=10 * STEPS * TOPK - 1))
    assert "at beta 0 trees have 15.9 nodes, not 16" in judged(good, "R14 trees and pads")


@pytest.mark.parametrize(
    ("server", "changed", "said"),
    [
        ("kept", {"recomputed": replace(SAME, off=3)}, "kept: 3 of 100 states"),
        ("rough", {"recomputed": Comparison(0, 0, 0.0)}, "rough: 0 of 0 states"),
        ("rough", {"aborted": 0}, "nothing was aborted"),
        ("rough", {"log": RETRACTED.replace("1", "0")}, "nothing was retracted"),
    ],
)
def test_a_recomputation_of_nothing_or_of_something_else_is_said(
    good: dict[str, Found], server: str, changed: dict[str, Any], said: str
):
    good[server] = replace(good[server], **changed)
    assert said in judged(good, "R4 recomputed")


def test_a_server_that_crashes_under_load_has_both_reasons_in_its_row(good: dict[str, Found]):
    log = f"{good['slots'].log}cudaErrorIllegalAddress: an illegal memory access was encountered\n"
    good["slots"] = replace(good["slots"], log=log, loaded=(), faults={"loaded": "C2TError: the server did not answer"})
    assert judged(good, "R3 SGLang 34384") == "slots: illegal memory access C2TError: the server did not answer"


def test_one_graph_is_captured_with_a_row_each_and_gets_whole_chains():
    """SGLang 34384: 192 requests with 1 row there, of which 32 with 6 are replayed."""
    whole, roots = LOADS["slots"]
    assert whole == (0.0, STEPS, GRAPHS[1]) and whole[2] * (STEPS + 1) == roots[2] <= MOST == max(GRAPHS)
    # no smaller graph would hold either, and a round has one after the other
    assert GRAPHS[0] * (STEPS + 1) < roots[2] and roots[1] == 0 and FULL.rounds > 1


def test_a_load_is_asked_for_pass_after_pass():
    asked: list[Any] = []

    class Noted(Client):
        def control(self, beta: float, steps: int) -> None:
            asked.append((beta, steps))

        def run(self, prompts: Any, concurrency: int, *_: Any) -> Pass:
            asked.append(concurrency)
            return super().run(prompts)

    passes = gpu_ladder._under_load(Noted("", MAX_TOKENS), [[1], [2]], LOADS["kept"], replace(FULL, rounds=2))  # type: ignore[arg-type]
    one_round = [(0.5, STEPS), MOST, (0.0, STEPS), MOST, (0.5, 0), MOST]
    assert asked == [*one_round, *one_round, (0.5, STEPS)] and len(passes) == 6


def test_every_server_is_looked_at():
    assert {name for _, needs in RUNGS.values() for name in needs} == set(SERVERS)


def test_states_that_are_not_the_same_ones_are_said(good: dict[str, Found]):
    good["eager"] = replace(good["eager"], traces=Recorded(states=4))  # type: ignore[arg-type]
    assert "6 and 4 states" in RUNGS["R6 graph and eager"][0](good)[1]


def test_the_chance_is_that_of_the_textbook():
    """Two by two: 30 of 100 against 50 of 100 is a statistic of 25/3 with one degree of freedom."""
    first, second = Counter({(1,): 30, (2,): 70}), Counter({(1,): 50, (2,): 50})
    assert p_value(first, second) == pytest.approx(0.0038924, rel=1e-4)
    assert p_value(first, first) == 1.0


def test_rare_outcomes_count_together():
    many = Counter({(0,): 900, **{(i,): 1 for i in range(1, 101)}})
    others = Counter({(0,): 900, **{(i,): 1 for i in range(101, 201)}})
    assert p_value(many, others) == 1.0
    assert p_value(Counter({(0,): 5}), Counter({(0,): 5})) == 1.0


def test_a_server_that_does_not_start_takes_its_rungs_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def serve(name: str, *_: Any) -> Any:
        raise ServerError(f"{name} did not\nstart")

    monkeypatch.setattr(gpu_ladder, "serve", serve)
    rows = run(tmp_path, gpu_ladder.DRY, None, float("inf"))
    assert {row.arm for row in rows} == set(RUNGS)
    assert all(row.error.startswith("not tried: ") and "\n" not in row.error for row in rows)
    assert "out of time" in run(tmp_path, gpu_ladder.DRY, None, 0.0)[0].error


@contextmanager
def running() -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(base_url="")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, good: dict[str, Found]) -> None:
    """Every server starts, and does what a good one does."""
    monkeypatch.setattr(gpu_ladder, "serve", lambda name, out, *_: (running(), out / "log", None))
    monkeypatch.setattr(gpu_ladder, "ask", lambda server, name, *_: good[name])


def test_a_rungs_row_is_there_before_the_next_server_starts(
    tmp_path: Path, served: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    written: dict[str, list[str]] = {}
    printed: list[str] = []
    serve = gpu_ladder.serve

    def noted(name: str, *others: Any) -> Any:
        written[name] = [row.arm for row in read_rows(tmp_path / gpu_ladder.ROWS, BenchRow)]
        printed.extend(capsys.readouterr().out.splitlines())
        assert [line[:20].strip() for line in printed] == written[name]
        return serve(name, *others)

    monkeypatch.setattr(gpu_ladder, "serve", noted)
    rows = run(tmp_path, DRY, None, float("inf"), ["R1", "R6", "R8", "R16"])
    assert written["plain"] == written["kept"] == []
    assert written["window"] == ["R16 both ends"]
    assert written["eager"] == ["R16 both ends", "R8 kept and window"]
    assert [row.arm for row in rows] == [*written["auto"], "R1 configuration"]
    assert rows == read_rows(tmp_path / gpu_ladder.ROWS, BenchRow) and not any(row.error for row in rows)


def test_what_servers_checked_at_start_is_written(
    tmp_path: Path, served: None, good: dict[str, Found], monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []

    def rows_of(state: Any, arm: str, *_: Any) -> list[BenchRow]:
        assert state == good[arm].state
        made.append(arm)
        run = RunRecord.capture(seed=0).to_json()
        return [BenchRow("gpu-self-check", "functional", arm, {}, {"seconds": 1.0}, "", run)]

    monkeypatch.setattr(gpu_ladder.self_checks, "rows_of", rows_of)
    run(tmp_path, DRY, None, float("inf"), ["R2", "R8"])
    assert made == ["kept", "window"]
    assert [row.arm for row in read_rows(tmp_path / "self-check.jsonl", BenchRow)] == made


def test_no_server_starts_that_would_take_too_long(tmp_path: Path, served: None, monkeypatch: pytest.MonkeyPatch):
    """Two of 40 s fit before 100 s, a third would not."""
    now = [0.0]
    monkeypatch.setattr(gpu_ladder, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ask_ = gpu_ladder.ask

    def slow(*arguments: Any) -> Found:
        now[0] += 40.0
        return ask_(*arguments)

    monkeypatch.setattr(gpu_ladder, "ask", slow)
    rows = {row.arm: row.error for row in run(tmp_path, DRY, None, 100.0, ["R8", "R16"])}
    assert rows == {"R16 both ends": "", "R8 kept and window": ""}
    rows = {row.arm: row.error for row in run(tmp_path, DRY, None, now[0] + 79.0, ["R8", "R16"])}
    assert rows == {"R16 both ends": "", "R8 kept and window": "not tried: {'window': 'out of time'}"}


class Client:
    """Answers, and has a server's state."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(self, prompts: Any, *_: Any) -> Pass:
        return Pass(answers().completions[:1] * len(prompts), 1.0)

    def c2t_state(self) -> dict[str, Any]:
        return {"beta": 0.5}

    def control(self, beta: float, steps: int) -> None:
        pass

    def stop_midway(self, prompt: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("broken", "error", "fallen"),
    [
        ("_gap", C2TError("no trace"), {"R10 gap"}),
        ("_under_load", C2TError("the server did\nnot answer"), {"R2 SGLang 31023, 31455"}),
        ("_recomputed", RuntimeError("out of\nmemory"), {"R4 recomputed"}),
        ("_recorded", C2TError("no drafts"), {"R4 recomputed", "R6 graph and eager"}),
    ],
)
def test_what_fails_beside_the_passes_is_its_own_rungs_fault(
    tmp_path: Path,
    good: dict[str, Found],
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    error: Exception,
    fallen: set[str],
):
    def breaks(*_: Any) -> Any:
        raise error

    log = tmp_path / "log"
    log.write_text(good["kept"].log)
    monkeypatch.setattr(gpu_ladder, "NativeClient", Client)
    right = {"_gap": 0.02, "_recomputed": SAME, "_recorded": good["kept"].traces, "_under_load": good["kept"].loaded}
    for name, value in right.items():
        monkeypatch.setattr(gpu_ladder, name, lambda *_, value=value: value)
    monkeypatch.setattr(gpu_ladder, broken, breaks)
    asked = ask(SimpleNamespace(base_url=""), "kept", DRY, log, tmp_path)
    assert asked.log == good["kept"].log and asked.uncut is not None and asked.samples.total() == DRY.samples
    # the other servers' answers are to other prompts
    extras = {name: getattr(asked, name) for name in ("traces", "recomputed", "gap_ms", "loaded", "faults")}
    good["kept"] = replace(good["kept"], **extras)
    judged_ = {rung: judged(good, rung) for rung in RUNGS}
    assert {rung for rung, fault in judged_.items() if fault} == fallen
    said = f"kept: {type(error).__name__}: {' '.join(str(error).split())}"
    assert all(said in judged_[rung] for rung in fallen)


@pytest.mark.parametrize(
    ("rung", "servers", "changed"),
    [
        ("R12 planner", "auto", {"state": {}}),
        ("R12 planner", "auto", {"state": {"planner": None}}),
        ("R16 both ends", "kept window", {"uncut": answers(steps=0)}),
    ],
)
def test_an_answer_that_a_check_cannot_read_is_one_rungs_fault(
    tmp_path: Path, served: None, good: dict[str, Found], rung: str, servers: str, changed: dict[str, Any]
):
    for server in servers.split():
        good[server] = replace(good[server], **changed)
    assert [row.arm for row in run(tmp_path, DRY, None, float("inf")) if row.error] == [rung]


def test_its_servers_are_told_to_compute_norms_of_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry_points = ""

    def run(out: Path, size: Any, environment: dict[str, str], *_: Any) -> list[BenchRow]:
        nonlocal entry_points
        folders = map(Path, environment["PYTHONPATH"].split(os.pathsep))
        entry_points = "".join(
            path.read_text() for each in folders for path in each.glob("*.dist-info/entry_points.txt")
        )
        return []

    monkeypatch.setattr(gpu_ladder, "run", run)
    assert gpu_ladder.main(["--out", str(tmp_path)]) == 0
    assert "benchmarks.gpu.float32:register" in entry_points


def test_rungs_are_chosen_with_their_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[str] = []

    def serve(name: str, *_: Any) -> Any:
        tried.append(name)
        raise ServerError("no")

    monkeypatch.setattr(gpu_ladder, "serve", serve)
    rows = run(tmp_path, gpu_ladder.DRY, None, float("inf"), ["R14", "R4"])
    assert [row.arm for row in rows] == ["R4 recomputed", "R14 trees and pads", "R14 greedy", "R14 sampled"]
    assert tried == ["plain", "kept", "rough", "tree", "padded tree"]


def test_spare_rows_that_a_graph_fills_are_no_fault(good: dict[str, Found]):
    for name in ("kept", "tree"):
        good[name] = replace(good[name], alone=answers(steps=9, accepted=30, candidates=45))
    assert {rung: judged(good, rung) for rung in RUNGS} == dict.fromkeys(RUNGS, "")


def test_a_rung_that_falls_says_what_was_found(tmp_path: Path, served: None, good: dict[str, Found]):
    good["tree"] = replace(good["tree"], together=answers(first=8))
    (row,) = [row for row in run(tmp_path, DRY, None, float("inf"), ["R9", "R14"]) if row.error]
    assert row.arm == "R14 greedy" and not row.metrics
    assert row.error == f"of {PROMPTS} outputs the same: {{'tree': 0}}; found {{'identical': 0, 'prompts': {PROMPTS}}}"


def test_a_server_left_out_takes_along_the_rungs_that_need_it(tmp_path: Path, served: None, good: dict[str, Found]):
    rows = run(tmp_path, DRY, None, float("inf"), ["R2", "R8", "R9", "R12"], 1, ["window", "auto"])
    assert [row.arm for row in rows] == ["R2 SGLang 31023, 31455", "R9 greedy", "R9 sampled"]
    assert not [row.error for row in rows if row.error]
    assert {row.setting["without"] for row in rows} == {"window, auto"}


def test_the_two_parts_of_the_gpu_run_are_the_whole_ladder():
    chosen = [SERVER_PARTS[part][2:] for part in ("ladder", "ladder-trees")]
    assert sorted([*chosen[0], *chosen[1]]) == sorted(NUMBERS)
