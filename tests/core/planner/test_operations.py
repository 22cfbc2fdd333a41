"""What deciding on a step dispatches to torch on the host: each operation takes as long there as a quick kernel."""

from __future__ import annotations

import pytest
import torch

from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.pace import Pace
from c2t_plugin.planner.step_planner import StepPlanner
from tests.support.core.dispatched import Dispatched

DEPTHS = (0, 1, 2, 4)
SIZES = tuple(range(1, 200))
CURVE = CostCurve(((1, 6e-3), (64, 8e-3), (256, 16e-3)), ((1, 5e-4), (64, 5e-4)), 0.0, 1e-3)
STEPS, SETTLED = 160, 80
# In the mean of many steps, fits of what steps cost included. It was 150 with what is planned by in tensors, for which
# an H200 waited, and 30 where each step was decided on by itself.
MOST = 16


@pytest.mark.parametrize("requests", [1, 32])
def test_deciding_on_a_step_takes_few_operations_of_torch(requests: int):
    planner = serving(requests)
    generator, counted = torch.Generator().manual_seed(0), Dispatched()
    drafting = 0
    for step in range(STEPS):
        if step == SETTLED:
            counted.found.clear()
        with counted:
            depth = planner.begin(requests)
            rows = planner.plan_rows(requests)
        assert rows is not None
        drafting += bool(depth) and step >= SETTLED
        planner.ended(depth)
        planner.ran(rows)
        sure = torch.rand(requests, max(depth, 1), generator=generator).sort(1, descending=True).values[:, :depth]
        planner.note(torch.stack([sure, sure.log()], dim=-1))
        whole = torch.full((requests,), depth)
        planner.learn((sure, whole, whole, ()))
    each = len(counted.found) / (STEPS - SETTLED)
    assert drafting > (STEPS - SETTLED) / 2 and each <= MOST


def serving(requests: int) -> StepPlanner:
    """One that packs, learns, times whole steps, and waits for nothing."""
    now = iter(range(10**6))
    pace = Pace(settled=1, clock=lambda: 6e-3 * next(now))
    planner = StepPlanner(
        CURVE, None, steps=4, most=4, device=torch.device("cpu"), depths=DEPTHS, calibration=Calibration(4)
    )
    planner.pace = pace
    assert planner._planner is not None
    planner._planner._pace = pace
    planner.packed, planner.sizes = True, lambda: SIZES
    planner.wait_for_nothing(requests, "cpu")
    return planner
