"""A curve whose points were measured while something else slowed the machine."""

from __future__ import annotations

import pytest

from c2t_plugin.planner.profile import REPEATS, WARM_UP, CostProfile


def measured(verify: dict[int, float], requests: int = 16, slow: range = range(0)) -> CostProfile:
    """Of the first steps of a size of batch; its passes take so many seconds, by their tokens. slow: measured steps in
    which the machine takes four times as long."""
    profile = CostProfile([count // requests - 1 for count in verify], lambda: None)
    for step in range(-WARM_UP, REPEATS * len(verify)):
        slower = 4.0 if step in slow else 1.0
        length = profile.length(requests)
        assert length is not None
        count = requests * (length + 1)
        profile.took("verify", count, slower * verify[count])
        profile.took("draft_extend", requests, slower * 0.007)
        profile.took("draft", requests, slower * 0.009)
    assert profile.length(requests) is None
    return profile


TAKEN = {16: 0.1, 32: 0.14, 48: 0.11, 80: 0.18, 112: 0.2}


def test_a_curve_stays_as_it_was_measured() -> None:
    """Where a larger pass takes less, too."""
    curve = measured(TAKEN).curve()
    assert curve is not None and dict(curve.verify) == pytest.approx(TAKEN)


@pytest.mark.parametrize("slow", [range(0, 7), range(3, 11), range(12, 20)])
def test_a_slow_while_makes_no_length_look_dear(slow: range) -> None:
    """As once measured on two busy cores, where drafting seemed to cost nothing."""
    curve = measured(TAKEN, slow=slow).curve()
    assert curve is not None
    ratios = [curve.verify_one(count) / seconds for count, seconds in TAKEN.items()]
    assert max(ratios) / min(ratios) < 1.1


def test_a_cycle_of_which_no_pass_of_the_target_was_measured_raises_nothing() -> None:
    profile = measured(TAKEN)
    for size in (64, 64, 64):
        profile.length(size)
        profile.took("draft", size, 0.01)
    assert profile.curve() is not None
