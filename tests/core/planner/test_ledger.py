"""What was expected beside what came."""

from __future__ import annotations

import pytest
import torch

from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.ledger import Ledger
from c2t_plugin.planner.planner import TAUGHT
from c2t_plugin.planner.step_planner import StepPlanner

CURVE = CostCurve(verify=((1, 1.0), (9, 1.8)), draft=((1, 0.1), (2, 0.1)))


def test_nothing_is_said_of_no_step():
    assert Ledger().state() == {"tokens": None, "seconds": None}


def test_the_newest_steps_count_most():
    ledger = Ledger()
    for expected, came in [(1.0, 4.0)] * 2000 + [(2.0, 1.0)] * 2000:
        ledger.add("seconds", expected, came)
    assert ledger.state()["seconds"] == pytest.approx(0.5, abs=0.01)


def test_a_planner_keeps_it_of_its_steps():
    """Two draft tokens are hoped for at .8 and .5 each step; every second one gets both, the others none."""
    now = [0.0]
    planner = StepPlanner(
        None,
        None,
        steps=2,
        most=2,
        device=torch.device("cpu"),
        depths=(0, 2),
        calibration=Calibration(2),
        clock=lambda: now[0],
    )
    planner.packed = True
    planner.curve = CURVE
    confidence = torch.tensor([[0.8, 0.5]])
    for step in range(40):
        planner.begin(1)
        planner._forced = None
        kept = planner.keep(torch.tensor([2], dtype=torch.int32), torch.tensor([False]), confidence)
        planner.ran(1 + int(kept))
        planner.learn((confidence, kept.long(), kept.long() * (step % 2), ()))
        # by the curve it would take 1.3
        now[0] += 2.6
    came = planner.state()["came"]
    assert kept.tolist() == [2]
    assert came["tokens"] == pytest.approx((1 + 3) / (2.3 * 2), abs=0.1)
    # what the steps take beside their passes is measured, so that it soon expects what comes
    assert 1.0 < came["seconds"] < 2.0


def test_plain_steps_are_expected_to_take_something_too():
    now = [0.0]
    shape = {"steps": 2, "most": 2, "device": torch.device("cpu"), "depths": (0, 2)}
    planner = StepPlanner(None, None, **shape, clock=lambda: now[0])
    planner.packed, planner.curve = True, CURVE
    confidence = torch.tensor([[0.01, 0.01]])
    plain, compared = 0, []
    planner._ledger.add = lambda what, expected, came: compared.append((what, expected, came))  # type: ignore[method-assign]
    for _ in range(60 + TAUGHT):
        depth, rows = planner.begin(1), 1
        plain += depth == 0 and planner._forced is None
        if depth:
            rows += int(planner.keep(torch.tensor([2], dtype=torch.int32), torch.tensor([False]), confidence))
        planner.ran(rows)
        now[0] += 1.5
    assert plain > 30
    assert len(compared) >= plain - 1
    # by the curve it would take 1; what it takes is known after a few steps
    assert [round(expected, 1) for _, expected, _ in compared[-3:]] == [1.5] * 3
