"""What steps cost beside what a curve has for their passes: fitted to whole steps, on a machine whose speed drifts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.curve import LEAST_SECONDS, CostCurve

# Draft tokens of a request in the target's pass at which the slope of its correction may change.
KNOTS = (0, 1, 2, 3, 5)
# How far corrections are believed to reach without evidence, as shares of a typical step: for plain decoding, for each
# depth, for a cut, and for each draft token in the target's pass, from each knot on.
BELIEVED = (0.1, 0.03, 0.1, *(0.1 for _ in KNOTS))
# Steps before and after one by whose median the machine's speed at that time is told from what the step did.
AROUND = 8
# No step is faster than a typical one by more than this: a clock that stood still has said nothing.
FASTEST = 1000.0
# Rounds of fitting costs by speed and speed by costs; more of them change nothing that matters.
ROUNDS = 3
# Relative errors up to which a step counts in full, near enough; further ones count by how far they are.
NEAR = 0.1


class Step(NamedTuple):
    """One whole step. seconds: until the next one. rows: of the target's pass. passes: of the draft."""

    seconds: float
    requests: int
    depth: int
    rows: int
    passes: int


class StepCosts(NamedTuple):
    """Seconds beside a curve's for the passes. always: of every step. plain: of one that drafts nothing, besides.
    a_depth: of each depth. a_cut: of a step that verifies less than it drafted, and has to pack rows for that; 0 or
    more. a_token: of a draft token a request in the target's pass, from each knot on."""

    always: float
    plain: float = 0.0
    a_depth: float = 0.0
    a_cut: float = 0.0
    a_token: tuple[float, ...] = (0.0,) * len(KNOTS)

    def beside(self, depth: int) -> float:
        """Of a step that drafts so deep, whatever it verifies."""
        return self.always + (self.a_depth * depth if depth else self.plain)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Of a target's pass with so many draft tokens a request, any shape -> float64; 0 for none."""
        return torch.as_tensor(_beyond_knots(tokens.double().numpy()) @ np.array(self.a_token))

    @classmethod
    def fit(cls, curve: CostCurve, steps: Sequence[Step], skips: bool = False) -> StepCosts:
        """Of one or more steps of batches of about one size, in their order. skips: see `before`.

        Least absolute errors, relative to what a step takes. What a machine is slower for a while than in the mean of
        all steps is taken out first: the depths of a slow while are not to look dear. A correction that has little
        evidence stays near zero.
        """
        took = np.maximum([step.seconds for step in steps], LEAST_SECONDS)
        first = cls.before(curve, skips)
        known = np.array([_known(curve, step) + (0.0 if step.depth else first.plain) for step in steps])
        depths = np.array([step.depth for step in steps])
        tokens = np.array([step.rows / step.requests - 1.0 for step in steps])
        kinds = np.column_stack([np.ones(len(steps)), depths == 0, depths, tokens < depths, _beyond_knots(tokens)])
        typical = float(np.median(took))
        took = np.maximum(took, typical / FASTEST)
        pull = np.diag([0.0, *((NEAR / (reach * typical)) ** 2 for reach in BELIEVED)])
        speed, near = np.ones_like(took), np.ones_like(took)
        found = np.zeros(kinds.shape[1])
        for _ in range(ROUNDS):
            weighted = kinds.T * (near / (took / speed) ** 2)
            found = np.linalg.solve(weighted @ kinds + pull, weighted @ (took / speed - known))
            expected = np.maximum(known + kinds @ found, LEAST_SECONDS)
            speed = _while_by_while(np.log(took / expected))
            near = NEAR / (np.abs(np.log(took / (expected * speed))) + NEAR)
        always, plain, a_depth, a_cut, *a_token = found.tolist()
        return cls(always, plain + first.plain, a_depth, max(0.0, a_cut), tuple(a_token))

    @classmethod
    def before(cls, curve: CostCurve, skips: bool = False) -> StepCosts:
        """As long as no step is known. skips: whether plain steps do without draft extend."""
        return cls(curve.beside, plain=-curve.draft_extend if skips else 0.0)


def _known(curve: CostCurve, step: Step) -> float:
    return curve.verify_one(step.rows) + step.passes * curve.draft_s(step.requests)


def _beyond_knots(tokens: Array) -> Array:
    """(...) -> (..., knots) how far beyond each knot."""
    return np.maximum(tokens[..., None] - np.array(KNOTS), 0.0)


def _while_by_while(drift: Array) -> Array:
    """(steps,) speed at each step, 1 in the geometric mean. drift: (steps,) logarithms of what came over what was
    expected."""
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(drift, AROUND, constant_values=np.nan), 2 * AROUND + 1)
    level = np.nanmedian(windows, axis=1)
    return np.exp(level - level.mean())
