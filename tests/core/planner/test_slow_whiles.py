"""A curve whose points were measured while something else slowed the machine."""

from __future__ import annotations

import pytest

from c2t_plugin.planner.profile import REPEATS, WARM_UP, CostProfile


def measured(verify: dict[int, float], requests: int = 16) -> CostProfile:
    """Of the first steps of a size of batch; its passes take so many seconds, by their tokens."""
    profile = CostProfile([count // requests - 1 for count in verify], lambda: None)
    for _ in range(WARM_UP + REPEATS * len(verify)):
        length = profile.length(requests)
        assert length is not None
        count = requests * (length + 1)
        profile.took("verify", count, verify[count])
        profile.took("draft_extend", requests, 0.007)
        profile.took("draft", requests, 0.009)
    assert profile.length(requests) is None
    return profile


def test_fewer_tokens_do_not_cost_more() -> None:
    """As once measured on two busy cores: with the mean of its first points drafting seemed to cost nothing."""
    curve = measured({16: 0.587, 32: 0.366, 48: 0.146, 80: 0.185, 112: 0.444}).curve()
    assert curve is not None
    assert [curve.verify_one(count) for count in (16, 32, 48, 80, 112)] == pytest.approx([0.146] * 3 + [0.185, 0.444])


def test_a_curve_that_rises_stays_as_it_is() -> None:
    taken = {16: 0.1, 32: 0.11, 48: 0.14, 80: 0.18, 112: 0.2}
    curve = measured(taken).curve()
    assert curve is not None and dict(curve.verify) == pytest.approx(taken)
