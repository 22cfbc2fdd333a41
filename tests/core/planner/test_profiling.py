"""The measured cost curve, with a clock whose time is known."""

from __future__ import annotations

import pytest
import torch

from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.profile import REPEATS, WARM_UP, CostProfile

LENGTHS = (0, 1, 2, 3)


class Machine:
    """Time passes as a cost curve says; the first steps are slower."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve, self.now, self.waits = curve, 0.0, 0
        self.profile = CostProfile(LENGTHS, synchronise=self.wait, clock=lambda: self.now)
        self.lengths: list[int | None] = []

    def wait(self) -> None:
        self.waits += 1

    def step(self, requests: int) -> None:
        length = self.profile.length(requests)
        self.lengths.append(length)
        drafted = LENGTHS[-1] if length is None else length
        tokens = requests * (1 + drafted)
        slow = 9.0 if len(self.lengths) <= WARM_UP else 1.0
        parts = {
            "draft": (requests, drafted * self.curve.draft_s(requests)),
            "verify": (tokens, float(self.curve.verify_s(torch.tensor(tokens)))),
            "draft_extend": (requests, self.curve.draft_extend),
        }
        for part, (count, seconds) in parts.items():
            passes = drafted if part == "draft" else 1
            with self.profile.timed(part, lambda count=count: count, passes):
                self.now += slow * seconds


@pytest.fixture
def machine() -> Machine:
    return Machine(CostCurve(verify=((1, 1.0), (64, 8.0)), draft=((1, 0.1), (16, 0.4)), draft_extend=0.25))


def test_every_length_is_measured_and_then_nothing(machine: Machine):
    for _ in range(machine.profile.steps_per_size + 3):
        machine.step(1)
    measured = machine.lengths[WARM_UP : machine.profile.steps_per_size]
    assert sorted(measured) == sorted(list(LENGTHS) * REPEATS)
    assert machine.lengths[-3:] == [None] * 3
    # before and after each of three parts of a measured step, and never else; at depth 0 nothing is drafted
    assert machine.waits == 2 * (3 * len(measured) - REPEATS)


def test_a_length_that_a_step_did_not_have_is_asked_for_again(machine: Machine):
    for _ in range(WARM_UP + 1):
        machine.step(1)
    before = machine.waits
    assert [machine.profile.length(1) for _ in range(1)] == [LENGTHS[WARM_UP + 1]]
    machine.profile.skip()
    with machine.profile.timed("verify", lambda: 1):
        machine.now += 99.0
    assert machine.waits == before
    for _ in range(machine.profile.steps_per_size - WARM_UP - 1):
        machine.step(1)
    measured = machine.lengths[WARM_UP:]
    assert sorted(measured) == sorted(list(LENGTHS) * REPEATS)
    found = machine.profile.curve()
    assert found is not None and max(seconds for _, seconds in found.verify) < 9.0


def test_the_curve_is_the_machines(machine: Machine):
    for requests in (1, 2, 4, 8):
        for _ in range(machine.profile.steps_per_size):
            machine.step(requests)
    found = machine.profile.curve()
    assert found.draft_extend == pytest.approx(0.25)
    assert [requests for requests, _ in found.draft] == [1, 2, 4, 8]
    for requests, seconds in found.draft:
        assert seconds == pytest.approx(machine.curve.draft_s(requests))
    assert [tokens for tokens, _ in found.verify] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    for tokens, seconds in found.verify:
        assert seconds == pytest.approx(float(machine.curve.verify_s(torch.tensor(tokens))))


def test_each_size_of_batch_is_measured_once(machine: Machine):
    for requests in (3, 4) * machine.profile.steps_per_size:
        machine.step(requests)
    assert machine.lengths.count(None) == machine.profile.steps_per_size
    machine.step(5)
    assert machine.lengths[-1] == 0


def test_a_size_between_two_that_are_known_is_not_measured(machine: Machine):
    """The end of a large batch passes through all of them."""
    for requests in (1, 16):
        for _ in range(machine.profile.steps_per_size):
            machine.step(requests)
    for requests in (8, 4, 2):
        machine.step(requests)
    assert machine.lengths[-3:] == [None] * 3
    machine.step(17)
    assert machine.lengths[-1] == 0


def test_there_is_no_curve_before_a_size_is_known(machine: Machine):
    for _ in range(machine.profile.steps_per_size - 1):
        machine.step(2)
        assert machine.profile.curve() is None
    machine.step(2)
    assert machine.profile.curve() is not None


def test_one_odd_measurement_bends_nothing(machine: Machine):
    for number in range(machine.profile.steps_per_size):
        if number == WARM_UP + 1:
            with machine.profile.timed("verify", lambda: 2):
                machine.now += 1000.0
        machine.step(1)
    assert max(seconds for _, seconds in machine.profile.curve().verify) < 2.0


def test_passes_larger_than_any_measured_go_on_as_at_start(machine: Machine):
    """Whose passes took less than those of steps, all by as much."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    machine.profile.seed({size: float(machine.curve.verify_s(torch.tensor(size))) - 0.5 for size in sizes})
    for _ in range(machine.profile.steps_per_size):
        machine.step(1)
    found = machine.profile.curve()
    assert [tokens for tokens, _ in found.verify] == [1, 2, 3, 4, 8, 16, 32, 64]
    for tokens, seconds in found.verify:
        assert seconds == pytest.approx(float(machine.curve.verify_s(torch.tensor(tokens))))


def test_what_is_measured_counts_whatever_the_start_said(machine: Machine):
    machine.profile.seed({1: 90.0, 2: 50.0, 3: 70.0, 4: 60.0, 64: 1.0})
    for _ in range(machine.profile.steps_per_size):
        machine.step(1)
    found = dict(machine.profile.curve().verify)
    assert {tokens: seconds for tokens, seconds in found.items() if tokens <= 4} == pytest.approx(
        {tokens: float(machine.curve.verify_s(torch.tensor(tokens))) for tokens in (1, 2, 3, 4)}
    )
    # no larger pass is known to be quicker than a smaller one
    assert found[64] == found[4]
