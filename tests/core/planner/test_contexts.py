"""Requests of short and of long contexts in turn: each is to be drafted for as deep as pays there, on machines made up.

What is judged is free of noise: expected tokens over what steps take on a quiet machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.pace import COUNTED_EVERY, Pace
from c2t_plugin.planner.step_costs import KNOTS, Step, StepCosts, near_knots
from c2t_plugin.planner.step_planner import StepPlanner

pytestmark = pytest.mark.slow

D_MAX = 6
# Tokens of context, and steps of one request.
SHORT, LONG, TURN = 500, 8000, 40
STEPS, LAST = 1600, 800


class Machine(NamedTuple):
    """Milliseconds of a step, of a token in the target's pass, of a draft pass; and for a thousand tokens of context of
    the step and of each token of the pass besides. chance: of each draft token after the one before it."""

    step: float
    token: float
    draft: float
    by_step: float
    by_token: float
    chance: float

    def milliseconds(self, depth: int, kept: int, context: int) -> float:
        thousands, rows = context / 1000, 1 + kept
        passes = max(0, depth - 1) * self.draft
        return self.step + passes + rows * self.token + thousands * (self.by_step + self.by_token * rows)

    def tokens(self, kept: int) -> float:
        return sum(self.chance**place for place in range(kept + 1))

    def rate(self, depth: int, context: int) -> float:
        return self.tokens(depth) / self.milliseconds(depth, depth, context)


# Keys are read once a step on a GPU, and computed with for each token on a CPU.
MACHINES = {
    "each token looks at all keys": Machine(40.0, 1.0, 1.0, 0.0, 5.0, 0.7),
    "keys are read once a step": Machine(20.0, 4.0, 12.0, 30.0, 0.0, 0.7),
}


class Served:
    """One request after the other, every other one of a long context."""

    def __init__(self, machine: Machine, counted: bool, seed: int) -> None:
        self.machine, self.rng, self.now, self.context = machine, random.Random(seed), 0.0, SHORT
        shape: dict[str, Any] = {"steps": D_MAX, "most": D_MAX, "device": torch.device("cpu")}
        self.planner = StepPlanner(None, None, **shape, depths=range(D_MAX + 1), clock=lambda: self.now)
        # parts of a step are measured on the same clock
        self.planner._profile.clock = lambda: self.now
        self.planner.packed = True
        if counted:
            self.planner.context = lambda: self.context

    def run(self, steps: int) -> dict[int, list[float]]:
        """Of short and long contexts, expected tokens and milliseconds of the last steps."""
        found = {SHORT: [0.0, 0.0], LONG: [0.0, 0.0]}
        for step in range(steps):
            kind = (SHORT, LONG)[step // TURN % 2]
            if step % TURN == 0:
                self.context = kind
                self.planner.interrupt()
            tokens, took = self.step()
            if step >= steps - LAST:
                found[kind] = [found[kind][0] + tokens, found[kind][1] + took]
        return found

    def step(self) -> tuple[float, float]:
        machine, noise = self.machine, math.exp(self.rng.gauss(0, 0.03))
        depth, kept = self.planner.begin(1), 0
        before = self.now
        if depth:
            sure = torch.full((1, depth), machine.chance, dtype=torch.float64).cumprod(1)
            kept = int(self.planner.keep(torch.tensor([depth], dtype=torch.int32), torch.tensor([False]), sure))
        took = machine.milliseconds(depth, kept, self.context)
        passes = max(0, depth - 1) * machine.draft
        with self.planner.timed("draft", lambda: 1):
            self.now += passes * noise / 1e3
        with self.planner.timed("verify", lambda: 1 + kept):
            self.now += (took - passes - 1.0) * noise / 1e3
        with self.planner.timed("draft_extend", lambda: 1):
            self.now += noise / 1e3
        assert self.now > before
        self.context += 1 + kept // 2
        return machine.tokens(kept), took


def share_of_the_best(machine: Machine, counted: bool) -> dict[int, float]:
    """By context, of the tokens per second of the best depth there, those that come."""
    shares: dict[int, list[float]] = {SHORT: [], LONG: []}
    for seed in range(3):
        for context, (tokens, took) in Served(machine, counted, seed).run(STEPS).items():
            best = max(machine.rate(depth, context) for depth in range(D_MAX + 1))
            shares[context].append(tokens / took / best)
    return {context: float(np.mean(found)) for context, found in shares.items()}


@pytest.mark.parametrize("machine", MACHINES)
def test_each_context_is_drafted_for_as_deep_as_pays_there(machine: str):
    shares = share_of_the_best(MACHINES[machine], counted=True)
    assert min(shares.values()) > 0.94, shares


@pytest.mark.parametrize("machine", MACHINES)
def test_who_counts_no_context_drafts_as_deep_for_both(machine: str):
    """So that the machines ask for something."""
    shares = share_of_the_best(MACHINES[machine], counted=False)
    assert min(shares.values()) < 0.9, shares


CURVE = CostCurve(verify=((1, 0.05), (101, 0.15)), draft=((1, 0.005), (2, 0.005)))
BY_STEP, BY_TOKEN = 4e-6, 5e-7


def steps(count: int, context: Callable[[random.Random], int]) -> list[Step]:
    """Of one request and all depths, which take more by their contexts, and take other tokens for that."""
    rng, found = random.Random(3), []
    for _ in range(count):
        depth, tokens = rng.randint(0, 6), context(rng)
        known = CURVE.verify_one(1 + depth) + max(0, depth - 1) * CURVE.draft_s(1)
        took = 0.02 + known + tokens * (BY_STEP + BY_TOKEN * depth)
        found.append(Step(took * math.exp(rng.gauss(0, 0.01)), 1, depth, 1 + depth, max(0, depth - 1), tokens))
    return found


def taken(costs: StepCosts, depth: int) -> float:
    """Seconds that a step is taken for."""
    known = CURVE.verify_one(1 + depth) + max(0, depth - 1) * CURVE.draft_s(1)
    return costs.scale * known + costs.beside(depth) + float(costs.of_tokens(near_knots(np.array(float(depth)))))


@pytest.mark.parametrize("context", [1024, 4096, 15360])
@pytest.mark.parametrize("depth", [0, 1, 3, 6])
def test_what_a_context_costs_is_found(context: int, depth: int):
    found = StepCosts.fit(CURVE, steps(512, lambda rng: rng.choice([1000, 5000, 16000])))
    known = CURVE.verify_one(1 + depth) + max(0, depth - 1) * CURVE.draft_s(1)
    assert taken(found.at(context), depth) == pytest.approx(
        0.02 + known + context * (BY_STEP + BY_TOKEN * depth), rel=0.05
    )


def test_contexts_that_were_not_seen_cost_what_the_nearest_did():
    found = StepCosts.fit(CURVE, steps(512, lambda rng: rng.choice([1024, 4096])))
    assert found.at(2**20) == found.at(4096) != found.at(1024) == found.at(0)


@pytest.mark.parametrize("context", [0, 3000])
def test_one_context_costs_what_the_steps_did(context: int):
    """Nothing can be told of others, and what is known of depths is as without contexts."""
    made = steps(256, lambda rng: context)
    without = StepCosts.fit(CURVE, [step._replace(context=0) for step in made])
    for at in (0, context, 10 * context):
        for depth in (0, 3, 6):
            assert taken(StepCosts.fit(CURVE, made).at(at), depth) == pytest.approx(taken(without, depth), rel=1e-9)


def test_costs_are_the_same_for_contexts_that_hardly_differ():
    """What follows from them is remembered by them."""
    found = StepCosts.fit(CURVE, steps(512, lambda rng: rng.choice([1000, 16000])))
    assert found.at(8192) == found.at(8200) == found.at(9215) != found.at(9216)
    assert found.at(8192).context is None and found.at(8192).at(20) == found.at(8192)


def test_a_price_for_every_token_is_the_knots_too():
    costs = StepCosts(0.0, context=StepCosts.fit(CURVE, steps(64, lambda rng: 1000)).context)
    assert costs.context is not None
    twice = costs._replace(context=costs.context._replace(usual=1024.0, least=0, most=4096, always=1.0, a_token=0.5))
    assert twice.at(2048).a_knot == tuple(0.5 * tokens for tokens in KNOTS) and twice.at(2048).always == 1.0


def test_contexts_are_counted_where_requests_change_and_now_and_then():
    now, counts = [0.0], []
    pace = Pace(clock=lambda: now[0])

    def context() -> int:
        counts.append(now[0])
        return 100 * len(counts)

    def run(requests: int, steps: int) -> None:
        for _ in range(steps):
            pace.begin(requests, context)
            pace.drafts(1, 0)
            pace.verifies(2 * requests)
            now[0] += 1.0

    run(1, 3)
    assert counts == [0.0]
    pace.interrupt()
    run(1, 3)
    assert counts == [0.0, 3.0]
    run(2, 3)
    assert counts == [0.0, 3.0, 6.0]
    run(2, 3 * COUNTED_EVERY)
    assert counts == [0.0, 3.0, 6.0, *(6.0 + COUNTED_EVERY * each for each in (1, 2, 3))]
    # a step has the context with which it began
    assert [step.context for step in pace._seen[0]] == [100, 100, 200, 200]
