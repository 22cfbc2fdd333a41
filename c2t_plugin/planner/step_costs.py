"""What steps cost beside what a curve has for their passes: fitted to whole steps, on a machine whose speed drifts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.curve import LEAST_SECONDS, CostCurve

# Draft tokens of a request in the target's pass of which each has a correction of its own. Between two of them it is on
# the line, beyond the last as there, of none nothing.
KNOTS = (1, 2, 3, 4, 6)
# How far corrections are believed to reach without evidence, as shares of a typical step: for plain decoding, for each
# depth, for a cut, at each knot, and for twice the usual context, of the step and of each draft token besides.
BELIEVED = (0.1, 0.03, 0.1, *(0.3 for _ in KNOTS), 0.3, 0.1)
# The same in a first round that leaves the rest, but plain steps, to the machine's speed: depths that were seen in a
# slow while would be taken for dear, and never be seen again.
AT_FIRST = (BELIEVED[0], *(1e-3 for _ in BELIEVED[1:-2]), *BELIEVED[-2:])
# How far knots between two others are off their line, and how far without evidence, as a share of a typical step: no
# size is dear between two cheap ones. Of the first none: a processor may compute two rows worse than eight.
OFF = np.array([(-1 / 2, 1, -1 / 2, 0, 0), (0, -1 / 2, 1, -1 / 2, 0), (0, 0, -2 / 3, 1, -1 / 3)])
OFF_LINE = 0.05
# Steps before and after one by whose median the machine's speed at that time is told from what the step did.
AROUND = 6
# No step is faster than a typical one by more than this: a clock that stood still has said nothing.
FASTEST = 1000.0
# Rounds of fitting costs by speed and speed by costs, after the first one; more of them change nothing that matters.
ROUNDS = 3
# Relative errors up to which a step counts in full, near enough; further ones count by how far they are.
NEAR = 0.1


class Step(NamedTuple):
    """One whole step. seconds: until the next one. rows: of the target's pass. passes: of the draft. context: tokens of
    all its requests together; 0 where nobody counts them."""

    seconds: float
    requests: int
    depth: int
    rows: int
    passes: int
    context: int = 0


class Context(NamedTuple):
    """What a step costs by the tokens of context that its requests have together. usual: of those steps that this was
    learnt from, the mean; least, most: of any of them. always, a_token: seconds more with twice the usual context, of
    the step, and of each draft token of a request."""

    usual: float
    least: int
    most: int
    always: float
    a_token: float


class StepCosts(NamedTuple):
    """Seconds beside a curve's for the passes. always: of every step. plain: of one that drafts nothing, besides.
    a_depth: of each depth. a_cut: of a step that verifies less than it drafted, and has to pack rows for that; 0 or
    more. a_knot: of so many draft tokens a request in the target's pass; see KNOTS. scale: what a second of the curve's
    passes takes, 1 at most. context: what all this is the usual context's of; None: of any."""

    always: float
    plain: float = 0.0
    a_depth: float = 0.0
    a_cut: float = 0.0
    a_knot: tuple[float, ...] = (0.0,) * len(KNOTS)
    scale: float = 1.0
    context: Context | None = None

    def beside(self, depth: int) -> float:
        """Of a step that drafts so deep, whatever it verifies."""
        return self.always + (self.a_depth * depth if depth else self.plain)

    def at(self, context: int) -> StepCosts:
        """Of steps with so many tokens of context: beyond what was seen, as with the nearest that was."""
        if self.context is None:
            return self
        usual, least, most, always, a_token = self.context
        # in few steps, since what follows from costs is remembered by them
        near = context & -(1 << max(0, context.bit_length() - 4))
        more = min(max(near, least), most) / usual - 1.0
        knots = tuple(knot + more * a_token * tokens for knot, tokens in zip(self.a_knot, KNOTS, strict=True))
        return self._replace(always=self.always + more * always, a_knot=knots, context=None)

    def of_tokens(self, near: Array) -> Array:
        """Of a target's pass with so many draft tokens a request, 0 for none. near: what `near_knots` has for them."""
        return np.dot(near, np.array(self.a_knot))

    @classmethod
    def fit(cls, curve: CostCurve, steps: Sequence[Step], skips: bool = False) -> StepCosts:
        """Of one or more steps of batches of about one size, in their order. skips: see `before`.

        Least absolute errors, relative to what a step takes, of a machine that is slower for a while. A correction that
        has little evidence stays near zero. Steps that take less than their passes say that the curve was measured in a
        slow while, all of it: what lies between its prices shrinks with them.
        """
        seconds, requests, depths, rows, _, contexts = np.array(steps, dtype=np.float64).T
        took = np.maximum(seconds, LEAST_SECONDS)
        took = np.maximum(took, np.median(took) / FASTEST)
        first = cls.before(curve, skips)
        asked = [(step.rows, step.passes, step.requests) for step in steps]
        known = {each: curve.verify_one(each[0]) + each[1] * curve.draft_s(each[2]) for each in set(asked)}
        passes = np.array([known[each] for each in asked])
        plain_s = np.where(depths == 0, first.plain, 0.0)
        scale = min(1.0, float(np.median(took / np.maximum(passes + first.always + plain_s, LEAST_SECONDS))))
        said = scale * (passes + plain_s)
        tokens = rows / requests - 1.0
        usual = float(contexts.mean())
        more = contexts / usual - 1.0 if usual else contexts
        kinds = np.column_stack(
            [np.ones_like(took), depths == 0, depths, tokens < depths, near_knots(tokens), more, more * tokens]
        )
        bent = scale * OFF @ [curve.verify_one(round(float(requests.mean()) * (1 + knot))) for knot in KNOTS]
        # what differs from the curve is its prices, or the machine's speed
        both = (_fitted(kinds, took, said, bent, begun) for begun in (BELIEVED, AT_FIRST))
        _, found = min(both, key=lambda fit: fit[0])
        always, plain, a_depth, a_cut, *a_knot, by_step, by_token = found.tolist()
        seen = Context(usual, int(contexts.min()), int(contexts.max()), by_step, by_token) if usual else None
        return cls(always, plain + scale * first.plain, a_depth, max(0.0, a_cut), tuple(a_knot), scale, seen)

    @classmethod
    def before(cls, curve: CostCurve, skips: bool = False) -> StepCosts:
        """As long as no step is known. skips: whether plain steps do without draft extend."""
        return cls(curve.beside, plain=-curve.draft_extend if skips else 0.0)


def _fitted(kinds: Array, took: Array, said: Array, bent: Array, first: Sequence[float]) -> tuple[float, Array]:
    """How little it explains, and (kinds,) seconds of each kind. bent: how far the curve is off lines, by OFF. first:
    how far corrections reach in the first round."""
    typical, speed, near = np.median(took), np.ones_like(took), np.ones_like(took)
    line = np.pad(OFF, ((0, 0), (4, 2)))
    straight = (NEAR / (OFF_LINE * typical)) ** 2 * line.T
    for believed in (first, *(BELIEVED,) * ROUNDS):
        pull = np.diag([0.0, *((NEAR / (reach * typical)) ** 2 for reach in believed)]) + straight @ line
        weighted = kinds.T * (near / (took / speed) ** 2)
        found = np.linalg.solve(weighted @ kinds + pull, weighted @ (took / speed - said) - straight @ bent)
        expected = np.maximum(said + kinds @ found, LEAST_SECONDS)
        speed = _while_by_while(np.log(took / expected))
        error = np.abs(np.log(took / (expected * speed)))
        near = NEAR / (error + NEAR)
    # with a speed that turns often anything is explained
    return float(error.sum() + np.abs(np.diff(np.log(speed))).sum()), found


def near_knots(tokens: Array) -> Array:
    """(...) draft tokens of a request -> (..., knots) weights of the knots around them."""
    places = np.concatenate([[0.0], KNOTS])
    return np.stack([np.interp(tokens, places, one) for one in np.eye(len(places))[1:]], axis=-1)


def _while_by_while(drift: Array) -> Array:
    """(steps,) speed at each step, 1 in the geometric mean. drift: (steps,) logarithm of what came over expectation."""
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(drift, AROUND, constant_values=np.nan), 2 * AROUND + 1)
    # the median of what is there, which at both ends is less: numpy's own takes most of a fit
    ordered, steps = np.sort(windows, axis=1), np.arange(len(drift))
    there = np.count_nonzero(~np.isnan(ordered), axis=1)
    level = (ordered[steps, (there - 1) // 2] + ordered[steps, there // 2]) / 2
    return np.exp(level - level.mean())
