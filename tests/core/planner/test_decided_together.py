"""A planner that waits for nothing decides some steps together, as if it had decided on each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from c2t_plugin.planner import OwnLimits, draft_passes
from c2t_plugin.planner.calibration import STEPS, WINDOW, Calibration
from c2t_plugin.planner.step_costs import StepCosts
from c2t_plugin.planner.step_planner import DRAFTS_TOGETHER, HELD, TOGETHER, StepPlanner
from tests.core.planner.test_operations import CURVE, serving

LIMIT = OwnLimits(0.3, None, exact=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> tuple[StepPlanner, list[tuple[int, int]]]:
    """A planner of at most 8 requests, and of each decision the requests, and the steps since the one before."""
    planner, calls = serving(8), []
    inner = planner._planner
    assert inner is not None
    decide = inner.depth

    def depth(requests: int, own: Any = (), steps: int = 1) -> int:
        calls.append((requests, steps))
        return decide(requests, own, steps)

    monkeypatch.setattr(inner, "depth", depth)
    return planner, calls


def step(planner: StepPlanner, requests: int, own: Any = (), of: float = 0.7) -> tuple[int, int | None]:
    depth = planner.begin(requests, own=own)
    rows = planner.plan_rows(requests)
    assert rows is not None
    planner.ran(rows)
    sure = torch.full((requests, depth), of).cumprod(1)
    planner.note(torch.stack([sure, sure.log()], dim=-1))
    return depth, rows


def test_of_some_steps_the_first_is_decided_and_probes_are_as_rare_as_before(asked: Any):
    planner, calls = asked
    found = [step(planner, 2) for _ in range(400)]
    # all steps are accounted for, so that probes cost no more and come no later
    assert 400 - HELD < sum(steps for _, steps in calls) <= 400
    assert 400 / HELD <= len(calls) < 400 / 2
    assert {steps for _, steps in calls} == {1, HELD}
    assert len(set(found)) > 1


def test_of_each_step_it_is_known_what_it_is_expected_to_take(asked: Any):
    """Those that draft too, of which rows are all that is decided."""
    planner, _ = asked
    planner.pace = planner._planner._pace = None
    compared = 0
    for number in range(9 * HELD):
        depth, rows = step(planner, 2)
        assert rows is not None
        if number < 3 * HELD or planner._planner.probing:
            # nothing was known of such drafts when it was decided, or nothing is asked
            continue
        passes = draft_passes(depth) * CURVE.draft_s(2) + float(CURVE.verify_s(torch.tensor(rows)))
        beside = StepCosts.before(CURVE, planner.skips).beside(depth)
        assert planner._promised_s == pytest.approx(passes + beside)
        compared += depth > 0
    assert compared > 2 * HELD


def test_another_number_of_requests_is_decided_on_at_once(asked: Any):
    planner, calls = asked
    for requests in (2, 2, 3, 3, 2):
        step(planner, requests)
    assert calls == [(2, 1), (3, 2), (2, 2)]


def test_limits_of_a_request_are_decided_on_in_each_step(asked: Any):
    planner, calls = asked
    for _ in range(3):
        step(planner, 2, [LIMIT, None])
    # nor do they hold for those that come after
    step(planner, 2)
    assert calls == [(2, 1)] * 4


def test_who_reads_a_steps_own_confidences_decides_on_each(asked: Any):
    planner, calls = asked
    planner._unread = None
    for _ in range(3):
        planner.begin(2)
    assert calls == [(2, 1)] * 3


def test_what_was_told_of_steps_of_several_depths_is_heard_in_its_order(asked: Any, monkeypatch: pytest.MonkeyPatch):
    planner, _ = asked
    heard: list[list[float]] = []
    monkeypatch.setattr(planner._planner, "observe", lambda sure: heard.append(sure[0].tolist()))
    monkeypatch.setattr(planner, "_meant", lambda sure: sure[..., 0].double())
    told = [
        torch.full((requests, depth, 2), 0.5 + place / 20)
        for place, (requests, depth) in enumerate([(1, 2), (3, 2), (2, 4), (1, 2), *[(2, 2)] * (HELD - 4)])
    ]
    for each in told:
        assert not heard
        planner._hear(planner._planner, each)
    assert heard == [pytest.approx(each[0, :, 0].tolist()) for each in told]


@pytest.mark.parametrize(("requests", "calls"), [(1, 64 // TOGETHER), (8, 64 // TOGETHER), (32, 64 // 2), (64, 64)])
def test_drafts_are_learnt_from_together_and_counted_by_steps(
    requests: int, calls: int, monkeypatch: pytest.MonkeyPatch
):
    planner, told = serving(requests), []
    taught = planner._calibration
    monkeypatch.setattr(taught, "learn", lambda sure, *_: told.append((len(sure), _[-1])))
    for _ in range(64):
        planner.learn((torch.full((requests, 2, 2), 0.5), *[torch.full((requests,), 2)] * 2, ()))
    assert len(told) == calls and sum(steps for _, steps in told) == 64
    assert max(drafts for drafts, _ in told) <= max(DRAFTS_TOGETHER, requests)


@pytest.mark.parametrize(("steps", "fits"), [(1, 0), (STEPS, 1)])
def test_a_full_window_waits_for_steps_however_they_come(steps: int, fits: int):
    taught = Calibration(2)
    full = torch.full((WINDOW, 2), 0.5), *[torch.full((WINDOW,), 2)] * 2
    taught.observe(*full, steps=STEPS)
    before = taught.fits
    taught.observe(*(each[:DRAFTS_TOGETHER] for each in full), steps=steps)
    assert taught.fits - before == fits
