"""What steps cost beside their passes, on a clock that the tests turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from c2t_plugin.planner import CostCurve, Planner
from c2t_plugin.planner.pace import MEMORY, RENEWED_BY, Pace
from c2t_plugin.planner.step_costs import near_knots

CURVE = CostCurve(verify=((1, 1.0), (101, 11.0)), draft=((1, 0.5), (2, 0.5)), fixed=9.0)


class Clock:
    """Seconds, as they are set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(pace: Pace, clock: Clock, seconds: float, requests: int = 1, depth: int = 2, rows: int = 3) -> None:
    """One step."""
    pace.begin(requests)
    pace.drafts(depth, max(0, depth - 1))
    pace.verifies(rows)
    clock.now += seconds


def known(pace: Pace, requests: int = 1, depth: int = 2, rows: int = 3, curve: CostCurve = CURVE) -> float:
    """Seconds that a step is taken for."""
    costs = pace.costs(curve, requests)
    assert costs is not None
    passes = curve.verify_one(rows) + max(0, depth - 1) * curve.draft_s(requests)
    return (
        costs.scale * passes + costs.beside(depth) + float(costs.of_tokens(near_knots(np.array(rows / requests - 1))))
    )


def test_the_distance_of_two_steps(clock: Clock):
    pace = Pace(clock=clock)
    assert pace.costs(CURVE, 1) is None
    run(pace, clock, 3.0)
    assert pace.costs(CURVE, 1) is None
    run(pace, clock, 3.0)
    assert known(pace) == pytest.approx(3.0, rel=0.02)


def test_an_odd_step_bends_nothing(clock: Clock):
    pace = Pace(clock=clock)
    for seconds in (3.0, 90.0, 3.0, 3.0, 3.0):
        run(pace, clock, seconds)
    assert known(pace) == pytest.approx(3.0, rel=0.02)


def test_the_newest_steps_count(clock: Clock):
    pace = Pace(clock=clock)
    for seconds in [3.0] * 50 + [5.0] * (MEMORY + 1):
        run(pace, clock, seconds)
    assert known(pace) == pytest.approx(5.0, rel=0.02)


@pytest.mark.parametrize("said", [(2,), (4, 2), (2, 4, 2)])
def test_the_depth_that_was_said_last_is_a_steps(clock: Clock, said: tuple[int, ...]):
    """On a GPU the first step of a kind does not count; the second and third do, whatever was planned before."""
    pace = Pace(settled=1, clock=clock)
    for seconds in (90.0, 3.0, 3.0, 3.0):
        pace.begin(1)
        for depth in said:
            pace.drafts(depth, max(0, depth - 1))
        pace.verifies(3)
        clock.now += seconds
    pace.begin(1)
    assert pace.state() == {"1": {"2": 3.0}}
    assert known(pace) == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("what", ["prefill", "another batch", "no target pass"])
def test_what_lies_between_other_steps_is_no_step(clock: Clock, what: str):
    pace = Pace(clock=clock)
    for _ in range(4):
        run(pace, clock, 3.0, rows=0 if what == "no target pass" else 3)
        if what == "prefill":
            pace.interrupt()
        elif what == "another batch":
            run(pace, clock, 3.0, requests=2)
    assert pace.costs(CURVE, 1) is None


def test_a_depth_lies_on_the_line_of_those_that_are_known(clock: Clock):
    pace = Pace(clock=clock)
    for _ in range(MEMORY):
        run(pace, clock, 4.0, depth=1, rows=2)
        run(pace, clock, 9.0, depth=4, rows=5)
    costs = pace.costs(CURVE, 1)
    assert costs is not None
    seconds = [known(pace, depth=depth, rows=depth + 1) for depth in (1, 2, 4)]
    assert seconds[0] == pytest.approx(4.0, rel=0.05) and seconds[2] == pytest.approx(9.0, rel=0.05)
    assert 4.0 < seconds[1] < 9.0
    assert pace.state() == {"1": {"1": 4.0, "4": 9.0}}


def test_batches_of_one_size_are_known_together(clock: Clock):
    pace = Pace(clock=clock)
    for _ in range(2):
        run(pace, clock, 4.0, requests=3)
    assert pace.costs(CURVE, 4) is pace.costs(CURVE, 3)
    for _ in range(2):
        run(pace, clock, 9.0, requests=5)
    assert known(pace, 5) != known(pace, 4)


def test_batches_of_a_size_that_was_not_seen_count_as_the_nearest(clock: Clock):
    pace = Pace(clock=clock)
    for requests, seconds in ((1, 4.0), (16, 9.0)):
        for _ in range(2):
            run(pace, clock, seconds, requests=requests)
    one, sixteen = known(pace, 1), known(pace, 16)
    assert one != sixteen
    assert [known(pace, n) for n in (2, 4, 5, 64)] == [one, one, sixteen, sixteen]


def test_another_curve_leaves_another_rest(clock: Clock):
    pace = Pace(clock=clock)
    for _ in range(2):
        run(pace, clock, 5.0)
    cheaper, dearer = (CostCurve(((1, first), (101, first + 10.0)), CURVE.draft) for first in (1.0, 2.0))
    rest = [pace.costs(curve, 1).beside(2) for curve in (cheaper, dearer)]
    assert rest[1] == pytest.approx(rest[0] - 1.0)


def test_costs_are_worked_out_again_after_some_steps_only(clock: Clock):
    pace = Pace(clock=clock)
    for _ in range(4 * RENEWED_BY + 1):
        run(pace, clock, 3.0)
    before = pace.costs(CURVE, 1)
    for _ in range(4):
        run(pace, clock, 5.0)
        assert pace.costs(CURVE, 1) is before
    run(pace, clock, 5.0)
    assert pace.costs(CURVE, 1) is not before


def test_costs_are_worked_out_again_where_they_may_be(clock: Clock):
    pace = Pace(clock=clock)
    pace.may_renew = False
    for _ in range(4 * RENEWED_BY + 1):
        run(pace, clock, 3.0)
    before = pace.costs(CURVE, 1)
    for _ in range(9):
        run(pace, clock, 5.0)
        assert pace.costs(CURVE, 1) is before
    pace.may_renew = True
    renewed = pace.costs(CURVE, 1)
    assert renewed is not before
    pace.may_renew = False
    # another curve's are wanted at once
    other = CostCurve(verify=CURVE.verify, draft=CURVE.draft, fixed=8.0)
    assert pace.costs(other, 1) is not renewed


def test_steps_of_other_batches_make_nothing_forgotten(clock: Clock):
    """Traffic that swings comes back to what it knew of a batch of that size."""
    pace = Pace(clock=clock)
    for _ in range(8):
        run(pace, clock, 9.0, depth=4, rows=5)
    before = known(pace, depth=4)
    for _ in range(2 * MEMORY):
        run(pace, clock, 3.0, requests=8)
    assert known(pace, depth=4) == before


def test_a_host_that_runs_ahead_takes_steps_of_one_kind_only(clock: Clock):
    """What is between two beginnings belongs to the step before, which must have been of the same kind."""
    pace = Pace(settled=1, clock=clock)
    for _ in range(3):
        run(pace, clock, 3.0, depth=2)
        run(pace, clock, 5.0, depth=4, rows=5)
    assert pace.costs(CURVE, 1) is None
    for _ in range(3):
        run(pace, clock, 3.0, depth=2)
    assert known(pace) == pytest.approx(3.0, rel=0.02)


def test_a_planner_believes_it_more_than_the_curve(clock: Clock):
    """By the curve drafting pays; what really passes between steps says that it does not."""
    cheap = CostCurve(verify=((1, 1.0), (9, 1.1)), draft=((1, 0.01), (2, 0.01)))
    pace = Pace(clock=clock)
    planner = Planner(cheap, 2, depths=(0, 2), pace=pace, taught=0)
    planner.keep(torch.tensor([[0.8, 0.6]]))
    assert planner.depth(1) == 2
    for _ in range(MEMORY):
        run(pace, clock, 1.0, depth=0, rows=1)
        # however much of it is verified: what was never run may be cheap
        for rows in (1, 2, 3):
            run(pace, clock, 5.0, depth=2, rows=rows)
    assert planner.depth(1) == 0


def test_a_step_in_which_a_draft_caught_up_counts_not(clock: Clock):
    """Its depth may be told again while it drafts, when it ends on its way."""
    pace = Pace(clock=clock)
    for _ in range(3):
        run(pace, clock, 3.0)
        pace.begin(1)
        pace.drafts(4, 3)
        pace.interrupt()
        pace.drafts(2, 1)
        pace.verifies(3)
        clock.now += 50.0
    assert pace.begin(1) is None
    assert pace.state() == {"1": {"2": 3.0}}
