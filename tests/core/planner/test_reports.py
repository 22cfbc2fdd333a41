"""Who is told what a planner has learnt: once a minute, where there is something new."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from c2t_plugin.engines import figures, learning
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.calibration import MOST_OF_ONE, Calibration
from c2t_plugin.planner.step_planner import TELL_EVERY_S, TOGETHER, StepPlanner

CURVE = CostCurve(verify=((1, 1.0), (9, 1.8)), draft=((1, 0.1), (2, 0.1)))
D_MAX = 2


def planner(clock: Any) -> StepPlanner:
    shape: dict[str, Any] = {"steps": D_MAX, "most": D_MAX, "device": torch.device("cpu"), "depths": range(D_MAX + 1)}
    return StepPlanner(CURVE, None, **shape, calibration=Calibration(D_MAX), clock=clock)


def teach(one: StepPlanner, steps: int) -> None:
    for step in range(steps):
        one.learn((torch.full((8, D_MAX), 0.6), torch.full((8,), D_MAX), torch.full((8,), step % 3), ()))


def test_they_are_told_once_a_minute_and_only_of_what_is_new():
    now, told = [0.0], []
    one = planner(lambda: now[0])
    one.listeners.append(told.append)
    teach(one, TOGETHER - 1)
    assert told == []
    teach(one, 1)
    assert [state["learnt"]["seen"] for state in told] == [TOGETHER * 8 * D_MAX]
    now[0] = TELL_EVERY_S - 1
    teach(one, 100)
    assert len(told) == 1
    now[0] = TELL_EVERY_S
    teach(one, TOGETHER)
    assert len(told) == 2
    now[0] = 3 * TELL_EVERY_S
    one.learn((torch.full((1, D_MAX), 0.6), torch.tensor([1]), torch.tensor([1]), ()))
    assert len(told) == 2


def test_few_drafts_are_learnt_from_together_as_each_alone():
    drawn = torch.Generator().manual_seed(2)
    together, alone = planner(lambda: 0.0), Calibration(D_MAX)
    for step in range(2 * TOGETHER - 1):
        width = 1 + step % 2
        sure = torch.rand((1, width, 2), generator=drawn)
        verified, accepted = torch.tensor([width]), torch.tensor([step % (width + 1)])
        together.learn((sure, verified, accepted, [step % 3]))
        alone.learn(sure, verified, accepted, [step % 3])
        assert together._calibration.seen <= alone.seen
    assert 0 < together._calibration.seen < alone.seen
    # who asks is told of all
    assert together.state()["learnt"]["seen"] == alone.seen
    mine = together._calibration
    assert mine._held == alone._held and all(map(np.array_equal, mine.window()[:2], alone.window()[:2]))
    np.testing.assert_allclose(mine._features[mine._known], alone._features[mine._known])
    np.testing.assert_allclose(mine._expected[0][mine._known], alone._expected[0][mine._known])


def test_what_is_known_of_earlier_drafts_by_now_is_learnt_in_the_same_step():
    one = planner(lambda: 0.0)
    since = [(torch.full((1, width), 0.6), torch.tensor([width]), torch.tensor([1]), ["b"]) for width in (1, D_MAX)]
    one.learn((torch.full((2, 1), 0.6), torch.tensor([1, 1]), torch.tensor([0, 1]), ["a", "c"]), *since)
    one.learn((torch.full((0, 1), 0.6), *[torch.zeros(0, dtype=torch.int64)] * 2, []), since[1])
    assert len(one._outcomes) == 2
    assert one.state()["learnt"]["seen"] == 2 + 1 + 2 * D_MAX
    assert one._calibration._steps == 2


def test_of_one_request_no_more_is_taken_however_many_steps_come_at_once():
    one = planner(lambda: 0.0)
    for _ in range(2 * MOST_OF_ONE):
        one.learn((torch.full((1, D_MAX), 0.6), torch.tensor([1]), torch.tensor([1]), ["the same"]))
    assert one.state()["learnt"]["seen"] == MOST_OF_ONE


def test_the_log_has_a_line(caplog: pytest.LogCaptureFixture):
    one = planner(lambda: 0.0)
    one.listeners.append(learning.tell)
    with caplog.at_level(logging.INFO):
        teach(one, TOGETHER)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("C2T: learnt from 128 draft tokens; accepted by depth (expected) 0.")
    # of one whose network learns too, another
    caplog.clear()
    state = one.state()
    with caplog.at_level(logging.INFO):
        for gain in (None, 0.012345):
            state["learnt"]["network"] = {"swaps": 2, "discarded": 1, "gain": gain}
            learning.tell(state)
    said = "C2T: learnt networks: 2 put in force, 1 thrown away; the last trial gained"
    assert caplog.messages[1::2] == [f"{said} ? nats a draft", f"{said} +0.0123 nats a draft"]
    # whose outcomes are all the same
    caplog.clear()
    one = planner(lambda: 0.0)
    one.listeners.append(learning.tell)
    with caplog.at_level(logging.INFO):
        one.learn((torch.full((64, D_MAX), 0.6), torch.full((64,), D_MAX), torch.full((64,), D_MAX), ()))
    assert "AUC nan" in caplog.messages[0]


def test_every_figure_has_a_gauge_and_every_gauge_a_figure():
    one = planner(lambda: 0.0)
    teach(one, 100)
    state = one.state()
    state["came"] = {"tokens": 1.0, "seconds": 0.5}
    state["learnt"]["network"] = {"swaps": 2, "discarded": 1}
    labels = {name: set(own) for name, _, own in figures.GAUGES}
    found = list(figures.figures(state))
    assert {name for name, _, _ in found} == set(labels)
    assert all(set(own) == labels[name] for name, _, own in found)
    assert len({(name, *own.values()) for name, _, own in found}) == len(found)
    # before anything is known
    assert {name for name, _, _ in figures.figures(planner(lambda: 0.0).state())} < set(labels)
