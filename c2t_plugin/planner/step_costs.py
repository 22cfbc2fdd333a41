"""What steps cost beside what a curve has for their passes: fitted to whole steps, on a machine whose speed drifts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from c2t_plugin.planner.curve import LEAST_SECONDS, CostCurve

# Draft tokens of a request in the target's pass at which the slope of its correction may change.
KNOTS = (0, 1, 2, 3, 5)
# How far corrections are believed to reach without evidence, as shares of a typical step: for plain decoding, for each
# depth, and for each draft token in the target's pass, from each knot on.
BELIEVED = (0.1, 0.03, *(0.1 for _ in KNOTS))
# Steps before and after one by whose median the machine's speed at that time is told from what the step did.
AROUND = 8
# Rounds of fitting costs by speed and speed by costs; two steps of a hundred percent differ by less after them.
ROUNDS = 4
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
    """Seconds beside the curve's. always: of every step. plain: of one that drafts nothing, besides. a_depth: of each
    depth. a_token: of a draft token a request in the target's pass, from each knot on."""

    always: float
    plain: float
    a_depth: float
    a_token: tuple[float, ...]

    def beside(self, depth: int) -> float:
        """Of a step that drafts so deep, whatever it verifies."""
        return self.always + (self.a_depth * depth if depth else self.plain)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Of a target's pass with so many draft tokens a request, any shape -> float64; 0 for none."""
        slopes = torch.tensor(self.a_token, dtype=torch.float64)
        return (_beyond_knots(tokens.double()) * slopes).sum(-1)

    @classmethod
    def fit(cls, curve: CostCurve, steps: Sequence[Step]) -> StepCosts:
        """Of one or more steps of batches of about one size, in their order.

        Least absolute errors, relative to what a step takes. What a machine is slower for a while than in the mean of
        all steps is taken out first: the depths of a slow while are not to look dear. A correction that has little
        evidence stays near zero.
        """
        took = torch.tensor([step.seconds for step in steps], dtype=torch.float64).clamp_min(LEAST_SECONDS)
        known = torch.tensor([_known(curve, step) for step in steps], dtype=torch.float64)
        depths = torch.tensor([step.depth for step in steps], dtype=torch.float64)
        tokens = torch.tensor([step.rows / step.requests - 1.0 for step in steps], dtype=torch.float64)
        parts = [torch.ones_like(depths), (depths == 0).double(), depths, *_beyond_knots(tokens).unbind(-1)]
        kinds = torch.stack(parts, dim=1)
        typical = float(took.median())
        pull = torch.tensor([0.0, *((NEAR / (reach * typical)) ** 2 for reach in BELIEVED)], dtype=torch.float64)
        speed, near = torch.ones_like(took), torch.ones_like(took)
        found = torch.zeros(len(parts), dtype=torch.float64)
        for _ in range(ROUNDS):
            weight = near / (took / speed) ** 2
            normal = (kinds.T * weight) @ kinds + torch.diag(pull)
            found = torch.linalg.solve(normal, (kinds.T * weight) @ (took / speed - known))
            expected = (known + kinds @ found).clamp_min(LEAST_SECONDS)
            speed = _while_by_while((took / expected).log())
            near = NEAR / ((took / (expected * speed)).log().abs() + NEAR)
        always, plain, a_depth, *a_token = found.tolist()
        return cls(always, plain, a_depth, tuple(a_token))


def _known(curve: CostCurve, step: Step) -> float:
    return curve.verify_one(step.rows) + step.passes * curve.draft_s(step.requests)


def _beyond_knots(tokens: Tensor) -> Tensor:
    """(...) -> (..., knots) how far beyond each knot."""
    return (tokens[..., None] - torch.tensor(KNOTS, dtype=torch.float64)).clamp_min(0.0)


def _while_by_while(drift: Tensor) -> Tensor:
    """(steps,) float64 speed at each step, 1 in the geometric mean. drift: (steps,) logarithms of what came over what
    was expected."""
    windows = torch.nn.functional.pad(drift, (AROUND, AROUND), value=torch.nan).unfold(0, 2 * AROUND + 1, 1)
    level = windows.nanmedian(1).values
    return (level - level.mean()).exp()
