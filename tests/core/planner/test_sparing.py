"""Steps without scores: taken where scores do not pay for what they take, on machines made up.

Time is made up too: nothing here waits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from c2t_plugin.planner import CostCurve, OwnLimits, Planner, switched_depths
from c2t_plugin.planner.ahead import DraftEnd
from c2t_plugin.planner.sparing import EVERY, FIRST, HELD, SCORED, SparingPlanner, Worth, _ScoredPlanner
from c2t_plugin.planner.step_planner import StepPlanner

D_MAX, REQUESTS = 6, 4
DEPTHS = range(D_MAX + 1)


@dataclass
class Machine:
    """Milliseconds of a step, of a row of the target's pass, of a draft pass, of the scores of a depth, and of a choice
    by them.

    A chain is easy or not, as likely, which says how likely each of its tokens is accepted after the one before it.
    told: whether confidences say which.
    """

    step: float = 40.0
    row: float = 1.5
    draft: float = 4.0
    scores: float = 0.5
    choice: float = 0.0
    easy: float = 0.9
    hard: float = 0.2
    told: bool = True

    def milliseconds(self, depth: int, rows: int) -> float:
        return self.step + max(0, depth - 1) * self.draft + rows * self.row

    def static_rate(self, depth: int) -> float:
        """Tokens per millisecond of static chains."""
        tokens = sum(sum(chance**place for place in range(depth + 1)) for chance in (self.easy, self.hard)) / 2
        return REQUESTS * tokens / self.milliseconds(depth, REQUESTS * (1 + depth))


class Served:
    """Steps of as many requests on a machine, drafts ended on their way."""

    def __init__(self, machine: Machine, curve: CostCurve | None = None, seed: int = 0) -> None:
        self.machine, self.rng, self.now, self.scored = machine, random.Random(seed), 0.0, 0.0
        shape: dict[str, Any] = {"steps": D_MAX, "most": D_MAX, "device": torch.device("cpu")}
        shape["depths"] = switched_depths(D_MAX)
        self.planner = SparingPlanner(curve, None, **shape, scored_s=lambda: self.scored, clock=lambda: self.now)
        self.planner.packed, self.planner.draft_end = True, DraftEnd()
        spent = self.planner._spent

        def choose(*given: Any) -> torch.Tensor:
            self.now += machine.choice / 1e3
            return spent(*given)

        self.planner._spent = choose  # type: ignore[method-assign]
        self.depths: list[int] = []
        self.scores: list[bool] = []
        self.tokens = self.took = 0.0

    def run(self, steps: int, own: Sequence[OwnLimits | None] = ()) -> Served:
        self.tokens = self.took = 0.0
        self.depths, self.scores = [], []
        for _ in range(steps):
            before = self.now
            self.step(own)
            self.took += self.now - before
        return self

    @property
    def rate(self) -> float:
        """Expected tokens per millisecond of the last run."""
        return self.tokens / self.took / 1e3

    @property
    def unscored(self) -> float:
        drafts = [scored for depth, scored in zip(self.depths, self.scores, strict=True) if depth]
        return 1.0 - sum(drafts) / len(drafts) if drafts else 0.0

    def chances(self) -> tuple[np.ndarray, np.ndarray]:
        """(REQUESTS, D_MAX) of each token with all before it, and what confidences make of that."""
        machine, places = self.machine, np.arange(1, D_MAX + 1)
        easy = np.array([[self.rng.random() < 0.5] for _ in range(REQUESTS)])
        chance = np.where(easy, machine.easy**places, machine.hard**places)
        mean = (machine.easy**places + machine.hard**places) / 2
        return chance, chance if machine.told else np.broadcast_to(mean, chance.shape)

    def step(self, own: Sequence[OwnLimits | None]) -> None:
        machine, planner = self.machine, self.planner
        noise = math.exp(self.rng.gauss(0, 0.02))
        depth = planner.begin(REQUESTS, own=own or [None] * REQUESTS)
        chance, known = self.chances()
        if depth and planner.scores:
            for drafted in range(1, depth):
                newest = known[:, drafted - 1].tolist()
                if not planner.goes_on(drafted, newest, [math.nan] * REQUESTS):
                    depth = drafted
                    planner.ended(depth)
                    break
        with planner.timed("draft", lambda: REQUESTS):
            self.spend(max(0, depth - 1) * machine.draft * noise, depth * machine.scores * planner.scores)
        kept = np.zeros(REQUESTS, dtype=np.int64)
        sure = torch.full((REQUESTS, depth), math.nan, dtype=torch.float64)
        if depth:
            if planner.scores:
                sure = torch.from_numpy(known[:, :depth].copy())
            own_beta = torch.zeros(REQUESTS, dtype=torch.bool)
            kept = planner.keep(torch.full((REQUESTS,), depth, dtype=torch.int32), own_beta, sure).numpy()
        with planner.timed("verify", lambda: REQUESTS + int(kept.sum())):
            self.spend((machine.step - 1.0 + machine.row * (REQUESTS + kept.sum())) * noise)
        with planner.timed("draft_extend", lambda: REQUESTS):
            self.spend(noise)
        tried = np.arange(D_MAX) < kept[:, None]
        self.tokens += REQUESTS + float((chance * tried).sum())
        drawn = np.array([[self.rng.random()] for _ in range(REQUESTS)]) < chance
        if depth:
            planner.learn((sure, torch.from_numpy(kept), torch.from_numpy((drawn & tried).sum(axis=1)), ()))
        self.depths.append(depth)
        self.scores.append(planner.scores)

    def spend(self, milliseconds: float, on_scores: float = 0.0) -> None:
        self.scored += on_scores / 1e3
        self.now += (milliseconds + on_scores) / 1e3


def best_static(machine: Machine) -> tuple[int, float]:
    rates = {depth: machine.static_rate(depth) for depth in DEPTHS}
    best = max(rates, key=rates.__getitem__)
    return best, rates[best]


def test_a_choice_is_part_of_what_scores_cost():
    """Of whatever steps are taken to cost without them nothing is left of it."""
    served = Served(Machine(choice=12.0)).run(600).run(400)
    planner = served.planner._planner
    assert isinstance(planner, _ScoredPlanner) and planner.price(REQUESTS) == pytest.approx((5e-4, 12e-3))
    assert served.unscored > 0.8
    assert served.rate > 0.99 * best_static(served.machine)[1]
    costs, without = planner.costs(REQUESTS), Planner.costs(planner, REQUESTS)
    assert costs.beside(0) == pytest.approx(without.beside(0))
    assert costs.beside(2) - without.beside(2) == pytest.approx(2 * 5e-4 + 12e-3)
    assert served.planner.state()["came"]["seconds"] == pytest.approx(1.0, abs=0.03)


def test_scores_that_pay_are_taken_in_every_step():
    machine = Machine()
    served = Served(machine).run(600).run(400)
    assert served.unscored == 0.0
    assert served.rate > 1.02 * best_static(machine)[1]


def test_scores_that_say_nothing_are_spared():
    machine = Machine(told=False)
    depth, rate = best_static(machine)
    served = Served(machine).run(600).run(400)
    assert served.unscored == pytest.approx(1 - SCORED / EVERY, abs=0.03)
    assert served.planner.state()["unscored"] > 0.5
    usual = sorted(served.depths)[len(served.depths) // 2]
    assert machine.static_rate(usual) > 0.99 * rate, f"{usual} in the place of {depth}"
    assert served.rate > 0.98 * rate


def test_so_are_those_that_take_more_than_they_save():
    machine = Machine(scores=6.0)
    served = Served(machine).run(600).run(400)
    assert served.unscored > 0.9
    assert served.rate > 0.97 * best_static(machine)[1]


def test_a_planner_that_always_scores_would_lose_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Worth, "note", lambda *_: None)
    machine = Machine(scores=6.0)
    served = Served(machine).run(600).run(400)
    assert served.unscored == 0.0
    assert served.rate < 0.95 * best_static(machine)[1]


def test_it_is_seen_when_they_pay_again():
    served = Served(Machine(told=False)).run(800)
    assert served.run(100).unscored > 0.9
    served.machine.told = True
    served.run(3000)
    assert served.run(300).unscored == 0.0


def test_it_is_seen_when_static_drafts_go_another_way():
    """From the outcomes of steps without scores, in which nothing else says it."""
    served = Served(Machine(told=False, easy=0.9, hard=0.9)).run(600)
    deep = served.run(64).depths
    served.machine.easy = served.machine.hard = 0.3
    served.run(400)
    shallow = served.run(64).depths
    assert np.median(deep) >= 4 and np.median(shallow) <= 2


def test_the_first_drafts_have_scores():
    served = Served(Machine(told=False, scores=6.0))
    served.run(FIRST)
    assert served.unscored == 0.0


def test_the_next_step_is_told_before_it_is_there():
    """Its first token is scored by the draft extend of the step before."""
    served = Served(Machine(told=False)).run(600)
    for _ in range(3 * EVERY):
        told = served.planner.scores_next
        served.run(1)
        assert served.planner.scores == told
    served.planner.interrupt()
    assert served.planner.scores_next


def test_who_has_limits_of_their_own_is_scored():
    served = Served(Machine(told=False)).run(600)
    limits = [OwnLimits(0.5, None, True), *[None] * (REQUESTS - 1)]
    assert served.run(2 * EVERY, limits).unscored == 0.0
    assert served.planner.scores_next
    assert served.run(2 * EVERY).unscored > 0.8


def test_a_curve_of_a_file_holds_for_all_that_a_step_takes():
    curve = CostCurve(verify=((4, 0.046), (28, 0.082)), draft=((1, 0.004), (8, 0.004)))
    served = Served(Machine(told=False, scores=6.0), curve).run(800)
    assert served.unscored == 0.0
    free = Served(Machine(told=False, scores=0.0), curve).run(800)
    assert served.depths == free.depths


@pytest.mark.parametrize("inactive", [True, False])
def test_whole_drafts_and_thresholds_are_scored(inactive: bool):
    served = Served(Machine(told=False)).run(600)
    served.planner.active = not inactive
    for _ in range(2 * EVERY):
        served.planner.begin(REQUESTS, whole=not inactive)
        assert served.planner.scores and served.planner.scores_next


def test_steps_are_measured_without_what_scores_take():
    served = Served(Machine(scores=6.0)).run(300)
    pace = served.planner.pace
    assert pace is not None
    static = served.planner._static
    assert static is not None
    for depth in (1, 4):
        known = static.seconds(REQUESTS)[depth]
        assert known == pytest.approx(served.machine.milliseconds(depth, REQUESTS * (1 + depth)) / 1e3, rel=0.1)


def chosen_anew(planner: SparingPlanner) -> None:
    """What steps without scores came to is heard when the next depth is chosen."""
    for _ in range(HELD):
        planner.begin(REQUESTS)


def test_what_ended_with_its_text_is_no_outcome():
    served = Served(Machine(told=False)).run(600)
    static = served.planner._static
    assert static is not None
    chosen_anew(served.planner)
    before = static.accepted.copy()
    none = torch.full((1, 4, 2), math.nan)
    served.planner.learn((none, torch.tensor([2]), torch.tensor([2]), ()))
    chosen_anew(served.planner)
    assert (static.accepted == before).all()
    served.planner.learn((none, torch.tensor([4]), torch.tensor([0]), ()))
    assert (static.accepted == before).all()
    chosen_anew(served.planner)
    assert (static.accepted != before).any()


@pytest.mark.parametrize("spared", [True, False])
def test_earlier_drafts_teach_in_a_step_without_scores_too(spared: bool, monkeypatch: pytest.MonkeyPatch):
    learnt: list[Any] = []
    monkeypatch.setattr(StepPlanner, "learn", lambda planner, *outcomes: learnt.extend(outcomes))
    served = Served(Machine(told=False)).run(600)
    static = served.planner._static
    assert static is not None
    learnt.clear()
    chosen_anew(served.planner)
    before = static.accepted.copy()
    sure = torch.full((1, 4, 2), math.nan if spared else 0.5)
    now = sure, torch.tensor([4]), torch.tensor([0]), ["a"]
    # wider than the step's, so that padding is no sign of what has no scores
    one, other = ((torch.full((1, 5, 2), 0.5), torch.tensor([5]), torch.tensor([hits]), ["b"]) for hits in (1, 2))
    served.planner.learn(now, one, other)
    assert learnt == [*([] if spared else [now]), one, other]
    chosen_anew(served.planner)
    assert (static.accepted != before).any() == spared
    # nothing of this step is known as yet
    learnt.clear()
    served.planner.learn((sure[:0], now[1][:0], now[2][:0], []), one)
    assert learnt == [one]


def test_no_choice_knows_what_is_drawn_in_its_own_step():
    """Two servers with other draws in the newest step decide alike in it."""

    def planned(last: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        served = Served(Machine(told=False)).run(600)
        planner = served.planner
        depth = planner.begin(REQUESTS)
        sure = torch.full((REQUESTS, max(depth, 1), 2), math.nan)
        verified = planner.keep(torch.full((REQUESTS,), depth, dtype=torch.int32), torch.zeros(REQUESTS).bool(), sure)
        planner.learn((sure, verified.long(), last(verified.long()), ()))
        return [depth, planner.scores, verified.tolist()]

    assert planned(torch.zeros_like) == planned(torch.clone)
