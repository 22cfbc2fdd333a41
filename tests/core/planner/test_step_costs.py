"""Costs that are fitted to whole steps, on machines that tests make up."""

from __future__ import annotations

import dataclasses
import math
import random
from statistics import median

import numpy as np
import pytest
import torch

from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.step_costs import AROUND, Step, StepCosts, _while_by_while, near_knots

CURVE = CostCurve(verify=((1, 0.05), (101, 0.15)), draft=((1, 0.005), (2, 0.005)))
TRUTH = StepCosts(0.02, 0.004, 0.002, 0.003, (0.003, 0.006, 0.009, 0.012, 0.018))


def seconds(depth: int, tokens: int, costs: StepCosts = TRUTH) -> float:
    """Of a step of one request."""
    known = CURVE.verify_one(1 + tokens) + max(0, depth - 1) * CURVE.draft_s(1)
    return (
        costs.scale * known
        + costs.beside(depth)
        + costs.a_cut * (tokens < depth)
        + float(costs.of_tokens(near_knots(np.array(tokens))))
    )


def steps(count: int, factor: list[float] | None = None, seed: int = 0) -> list[Step]:
    """Of one request, of all depths and cuts in a random order. factor: how much slower each is than it should be."""
    rng, found = random.Random(seed), []
    for at in range(count):
        depth = rng.randint(0, 6)
        tokens = rng.randint(depth // 2, depth)
        slower = 1.0 if factor is None else factor[at]
        found.append(Step(slower * seconds(depth, tokens), 1, depth, 1 + tokens, max(0, depth - 1)))
    return found


def furthest(costs: StepCosts) -> float:
    """Of all kinds of step, the largest relative error once what is common to all is taken out."""
    kinds = [(depth, tokens) for depth in range(7) for tokens in range(depth + 1)]
    errors = [math.log(seconds(*kind, costs) / seconds(*kind)) for kind in kinds]
    return max(abs(error - sum(errors) / len(errors)) for error in errors)


def test_what_a_steady_machine_takes_is_found():
    assert furthest(StepCosts.fit(CURVE, steps(256))) < 0.01


def test_what_a_cut_costs_is_found():
    assert StepCosts.fit(CURVE, steps(256)).a_cut == pytest.approx(TRUTH.a_cut, rel=0.3)


def test_no_cut_is_cheaper_than_none():
    cheaper = TRUTH._replace(a_cut=-0.01)
    made = [step._replace(seconds=seconds(step.depth, step.rows - 1, cheaper)) for step in steps(256)]
    assert StepCosts.fit(CURVE, made).a_cut == 0.0


def test_slow_whiles_make_no_depth_look_dear():
    """Half of the time the machine is slower by half. Without looking at whiles the error is several times as large."""
    whiles = [1.5 if at // 24 % 2 else 1.0 for at in range(256)]
    worst = max(furthest(StepCosts.fit(CURVE, steps(256, whiles, seed))) for seed in range(5))
    assert worst < 0.03


@pytest.mark.parametrize("slower", [3.0, 0.4])
def test_a_while_makes_no_depth_look_dear_that_was_seen_in_no_other(slower: float):
    """The first steps try each depth while the machine is slow, or fast, and then one depth alone is drafted."""
    rng = random.Random(7)

    def noise() -> float:
        return math.exp(rng.gauss(0, 0.02))

    first = [
        Step(slower * noise() * seconds(depth, depth), 1, depth, 1 + depth, max(0, depth - 1))
        for depth in (*range(5),) * 6
    ]
    then = [Step(noise() * seconds(3, 3), 1, 3, 4, 2) for _ in range(300)]
    found = StepCosts.fit(CURVE, first + then)
    prices = [seconds(depth, depth, found) for depth in range(5)]
    assert prices == pytest.approx([prices[3] * seconds(depth, depth) / seconds(3, 3) for depth in range(5)], rel=0.1)


@pytest.mark.parametrize("count", [1, 2, AROUND, 2 * AROUND + 1, 5 * AROUND])
def test_the_speed_of_a_while_is_the_median_around_each_step(count: int):
    rng = random.Random(count)
    drift = [rng.gauss(0, 1) for _ in range(count)]
    levels = [median(drift[max(0, at - AROUND) : at + AROUND + 1]) for at in range(count)]
    expected = [math.exp(level - sum(levels) / count) for level in levels]
    assert _while_by_while(np.array(drift)).tolist() == pytest.approx(expected, rel=1e-12)


def test_single_odd_steps_bend_little():
    rng = random.Random(1)
    odd = [3.0 if rng.random() < 0.05 else math.exp(rng.gauss(0, 0.02)) for _ in range(256)]
    assert furthest(StepCosts.fit(CURVE, steps(256, odd))) < 0.03


def test_a_curve_with_a_dent_is_straightened():
    """A point that a bad moment made half as dear again; the steps tell."""
    dented = CostCurve(verify=((1, 0.05), (3, 0.052), (4, 0.09), (5, 0.09), (7, 0.09)), draft=CURVE.draft)
    found = StepCosts.fit(dented, steps(256))
    passes = found.scale * dented.verify_s(torch.tensor([3, 4])).numpy() + found.of_tokens(near_knots(np.array([2, 3])))
    assert float(passes[1] - passes[0]) < 0.5 * (0.09 - 0.052)


def test_a_curve_that_was_measured_in_a_slow_second_is_scaled():
    """By plain steps alone: a draft's price falls with theirs."""
    slow = CostCurve(
        tuple((count, 2 * seconds) for count, seconds in CURVE.verify),
        tuple((count, 2 * seconds) for count, seconds in CURVE.draft),
        fixed=0.02,
    )
    plain = seconds(0, 0, StepCosts(0.02))
    found = StepCosts.fit(slow, [Step(plain, 1, 0, 1, 0)] * 50)
    drafted = found.scale * (slow.verify_one(5) + 3 * slow.draft_s(1)) + found.beside(4)
    assert drafted == pytest.approx(seconds(4, 4, StepCosts(0.02)), rel=0.15)
    assert plain == pytest.approx(found.scale * slow.verify_one(1) + found.beside(0), rel=0.02)


def test_what_one_size_takes_says_nothing_of_another():
    """Two rows are computed badly, and nothing else was run: eight may still be as the curve has it."""
    plain, one = Step(seconds(0, 0), 1, 0, 1, 0), Step(seconds(1, 1) + 0.04, 1, 1, 2, 0)
    found = StepCosts.fit(CURVE, [plain, one] * 64)
    bump, further = found.of_tokens(near_knots(np.array([1, 4]))).tolist()
    assert bump > 0.02
    assert abs(further) < 0.1 * bump


def test_what_has_no_evidence_stays_the_curves():
    one_kind = [Step(0.1, 1, 2, 3, 1)] * 50
    found = StepCosts.fit(CURVE, one_kind)
    said = CURVE.verify_one(3) + CURVE.draft_s(1)
    assert found.plain == 0 and [found.a_knot[place] for place in (0, 2, 3, 4)] == pytest.approx([0.0] * 4, abs=1e-9)
    assert found.scale * said + found.beside(2) + found.a_knot[1] == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("took", [0.0, 1e-12, 1e6])
def test_times_that_no_machine_takes_stay_numbers(took: float):
    found = StepCosts.fit(CURVE, [Step(took, 1, 2, 3, 1), Step(0.1, 1, 0, 1, 0)])
    assert all(map(math.isfinite, (found.always, found.plain, found.a_depth, *found.a_knot, found.scale)))


def test_a_batch_costs_by_draft_tokens_of_a_request():
    found = StepCosts(0.0, 0.0, 0.0, 0.0, (1.0, 3.0, 0.0, 0.0, 2.0))
    tokens = np.array([0.0, 0.5, 1.0, 2.0, 2.5, 5.0, 6.0, 9.0])
    assert found.of_tokens(near_knots(tokens)).tolist() == [0.0, 0.5, 1.0, 3.0, 1.5, 1.0, 2.0, 2.0]


def test_plain_steps_without_draft_extend_are_cheaper_before_and_after_they_are_measured():
    """As much as it takes, which is more than a correction without evidence may be."""
    curve = dataclasses.replace(CURVE, draft_extend=0.04)
    assert StepCosts.before(curve, skips=True).beside(0) == pytest.approx(curve.fixed)
    assert StepCosts.before(curve, skips=True).beside(1) == StepCosts.before(curve).beside(0) == curve.beside
    skipping = TRUTH._replace(plain=-0.04)
    made = [step._replace(seconds=seconds(step.depth, step.rows - 1, skipping)) for step in steps(256)]
    found = StepCosts.fit(curve, made, skips=True)
    assert found.beside(0) - found.always == pytest.approx(-0.04, rel=0.1)
    few = [step for step in made if step.depth][:16] + [step for step in made if not step.depth][:1]
    errors = [abs(StepCosts.fit(curve, few, skips).plain + 0.04) for skips in (True, False)]
    assert errors[0] < errors[1]


def test_no_size_is_dear_between_two_cheap_ones():
    """As a server recorded it: the first drafts of depth 3 fell in slow moments, and a planner that takes it for dear
    drafts all others."""
    rng = random.Random(3)
    depths = [*range(7), *range(7), 3, 3, *rng.choices((2, 4), (1, 4), k=100)]
    slower = [1.4 if depth == 3 else math.exp(rng.gauss(0, 0.05)) for depth in depths]
    made = [
        Step(slow * seconds(depth, depth), 1, depth, 1 + depth, max(0, depth - 1))
        for depth, slow in zip(depths, slower, strict=True)
    ]
    below, there, above = (seconds(depth, depth, StepCosts.fit(CURVE, made)) for depth in (2, 3, 4))
    assert there < 1.1 * (below + above) / 2
