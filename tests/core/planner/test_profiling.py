"""The measured cost curve, with a clock whose time is known."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from c2t_plugin.errors import ConfigError
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.profile import BETWEEN, EACH, REPEATS, WARM_UP, CostProfile, lengths_to

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


def test_a_size_between_two_that_are_known_is_not_measured_in_passing(machine: Machine):
    """The end of a large batch passes through all of them."""
    for requests in (1, 16):
        for _ in range(machine.profile.steps_per_size):
            machine.step(requests)
    for requests in (8, 4, 2):
        machine.step(requests)
    assert machine.lengths[-3:] == [None] * 3
    machine.step(17)
    assert machine.lengths[-1] == 0


def test_but_one_step_in_some_of_one_that_stays_is(machine: Machine):
    """At temperature .7 a planner that knew 1 and 16 requests took a second token of four to cost far too much."""
    measured(machine, 1, 16)
    before = machine.profile.curve()
    for _ in range(BETWEEN * machine.profile.steps_per_size - 1):
        machine.step(4)
    # the line until it is known
    assert 2 not in machine.profile.sizes and machine.profile.curve() == before
    for _ in range(2):
        machine.step(4)
    asked = machine.lengths[2 * machine.profile.steps_per_size :]
    lengths = asked[BETWEEN - 1 :: BETWEEN]
    assert sorted(lengths[WARM_UP:]) == sorted(LENGTHS * REPEATS)
    assert len(asked) - asked.count(None) == len(lengths) == machine.profile.steps_per_size
    assert 2 in machine.profile.sizes
    assert dict(machine.profile.curve().verify)[8] == pytest.approx(machine.curve.verify_one(8))


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


def measured(machine: Machine, *sizes: int) -> Machine:
    for requests in sizes:
        for _ in range(machine.profile.steps_per_size):
            machine.step(requests)
    return machine


def another(machine: Machine) -> Machine:
    """A server that starts where another one has been, on a machine that is as fast."""
    found = Machine(machine.curve)
    found.now = machine.now
    # as a file has it
    found.profile = found.profile.resumed(json.loads(json.dumps(machine.profile.measured())))
    # whose first steps are as fast as any
    found.lengths = [None] * WARM_UP
    return found


def test_who_goes_on_has_the_curve_of_who_was_never_stopped(machine: Machine):
    whole = measured(Machine(machine.curve), 1, 4, 16)
    later = another(measured(machine, 1, 4))
    assert later.profile.curve() == machine.profile.curve() != whole.profile.curve()
    measured(later, 16)
    assert later.profile.curve() == whole.profile.curve()
    assert later.profile.measured() == whole.profile.measured()


def test_who_goes_on_measures_what_is_not_known_and_nothing_else(machine: Machine):
    later = another(measured(machine, 1, 4))
    for requests in (1, 2, 3, 4):
        later.step(requests)
    assert later.lengths[WARM_UP:] == [None] * 4 and later.waits == 0
    measured(later, 5)
    assert sorted(later.lengths[-REPEATS * len(LENGTHS) :]) == sorted(LENGTHS * REPEATS)


def test_a_size_that_is_known_in_part_is_measured_from_its_beginning(machine: Machine):
    measured(machine, 1)
    known = machine.profile.measured()
    for _ in range(machine.profile.steps_per_size - 1):
        machine.step(4)
    assert machine.profile.measured() == known
    later = another(machine)
    assert later.profile.length(4) == LENGTHS[0]


def test_what_the_server_timed_at_start_is_not_kept(machine: Machine):
    """It is timed anew, and goes on from what is measured then."""
    measured(machine, 1)
    machine.profile.seed({4: 1.0, 64: 3.0})
    assert machine.profile.curve().verify[-1][0] == 64
    assert max(tokens for tokens, *_ in machine.profile.measured()["verify"]) == 4
    later = Machine(machine.curve)
    later.profile.seed({4: 1.0, 128: 5.0})
    found = later.profile.resumed(machine.profile.measured()).curve()
    assert [tokens for tokens, _ in found.verify] == [1, 2, 3, 4, 128]


@pytest.mark.parametrize(
    ("part", "row"),
    [
        *(("verify", [1, seconds, 0, 0, 0]) for seconds in (0.0, -1.0, 1e9, math.nan, math.inf, 1, "1", None, True)),
        *(("draft", [tokens, 0.1, 0, 0, 0]) for tokens in (0, -1, 2**31, 1.0, True, "1", None)),
        *(("draft", [1, 0.1, *rest]) for rest in ((-1, 0, 0), (0, 0.5, 0), (0, 0, "0"), (0, 0), (0, 0, 0, 0))),
        ("draft_extend", 7),
    ],
)
def test_what_no_server_has_measured_is_refused(machine: Machine, part: str, row: Any):
    found = measured(machine, 1).profile.measured()
    fresh = Machine(machine.curve).profile
    with pytest.raises(ConfigError, match="no passes of a server"):
        fresh.resumed({**found, part: [*found[part], row]})
    assert fresh.curve() is None and fresh.length(1) == LENGTHS[0]


@pytest.mark.parametrize("found", [None, 7, [], {}, {"verify": [], "draft": []}, "verify"])
def test_so_is_what_is_nothing_of_the_kind(machine: Machine, found: Any):
    with pytest.raises(ConfigError, match="no passes of a server"):
        machine.profile.resumed(found)


@pytest.mark.parametrize("part", ["verify", "draft", "draft_extend"])
def test_so_are_passes_of_which_a_kind_is_missing(machine: Machine, part: str):
    found = measured(machine, 1).profile.measured()
    with pytest.raises(ConfigError, match="passes are missing"):
        machine.profile.resumed({**found, part: []})


@pytest.mark.parametrize("most", [1, 4, EACH])
def test_of_few_draft_tokens_each_number_is_measured(most: int):
    assert list(lengths_to(most)) == list(range(most + 1))


@pytest.mark.parametrize(("most", "lengths"), [(9, (0, 1, 2, 4, 8, 9)), (59, (0, 1, 2, 4, 8, 16, 32, 59))])
def test_of_many_each_is_twice_the_one_before(most: int, lengths: tuple[int, ...]):
    """A tree of 59 nodes waited for the device in 242 steps of each size of batch: two seconds on a GPU."""
    assert tuple(lengths_to(most)) == lengths
