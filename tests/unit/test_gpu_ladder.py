"""The ladder's verdicts: each rung holds on what a good server does, and falls on the fault that it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("openai", reason="the servers' client is not installed in this environment")

from benchmarks import gpu_ladder
from benchmarks.gpu import SERVERS as SERVER_PARTS
from benchmarks.gpu_ladder import MAX_TOKENS, SERVERS, run
from benchmarks.gpu_rungs import NUMBERS, RUNGS, STEPS, TOPK, Found, p_value
from benchmarks.recomputed import Comparison
from benchmarks.serving import Completion, Pass
from c2t_plugin.engines.server_process import ServerError

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
    found["tree"] = replace(found["tree"], uncut=answers(candidates=10 * STEPS * TOPK))
    return found


def test_every_rung_holds_on_good_servers(good: dict[str, Found]):
    assert {rung: judged(good, rung) for rung in RUNGS} == dict.fromkeys(RUNGS, "")


def judged(servers: dict[str, Found], rung: str) -> str:
    check, needs = RUNGS[rung]
    return check({name: servers[name] for name in needs})[1]


# rung: server with the fault, what is changed
FAULTS: dict[str, tuple[str, Callable[[Found], dict[str, Any]]]] = {
    "R1 configuration": ("window", lambda found: {"log": ""}),
    "R4 recomputed": ("rough", lambda found: {"recomputed": replace(SAME, off=3)}),
    "R6 graph and eager": ("eager", lambda found: {"traces": Recorded(shift=0.1)}),
    "R8 kept and window": ("kept", lambda found: {"together": answers(accepted=28)}),
    "R9 greedy": ("eager", lambda found: {"together": answers(first=8)}),
    "R9 sampled": ("auto", lambda found: {"samples": Counter({(1, 2): 400, (1, 3): 400, (2, 2): 200})}),
    "R10 gap": ("sync", lambda found: {"gap_ms": None}),
    "R12 planner": ("auto", lambda found: {"state": {**found.state, "planner": {"active": True, "curve": False}}}),  # type: ignore[dict-item]
    "R14 trees and pads": ("padded tree", lambda found: {"alone": answers(candidates=41)}),
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
    good["tree"] = replace(good["tree"], uncut=answers(candidates=10 * STEPS * TOPK - 1))
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


def test_rungs_are_chosen_with_their_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[str] = []

    def serve(name: str, *_: Any) -> Any:
        tried.append(name)
        raise ServerError("no")

    monkeypatch.setattr(gpu_ladder, "serve", serve)
    rows = run(tmp_path, gpu_ladder.DRY, None, float("inf"), ["R14", "R4"])
    assert [row.arm for row in rows] == ["R4 recomputed", "R14 trees and pads", "R14 greedy", "R14 sampled"]
    assert tried == ["plain", "kept", "rough", "tree", "padded tree"]


def test_the_two_parts_of_the_gpu_run_are_the_whole_ladder():
    chosen = [SERVER_PARTS[part][2:] for part in ("ladder", "ladder-trees")]
    assert sorted([*chosen[0], *chosen[1]]) == sorted(NUMBERS)
