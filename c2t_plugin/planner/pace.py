"""What whole steps cost beside their passes, from the time between the beginnings of one step and the next.

A curve knows the passes of target and draft. A server does more: it schedules, samples, answers, and its draft reads
what was accepted. All of that is in the time from one step to the next, which costs nothing to measure.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from c2t_plugin.planner.curve import CostCurve
from c2t_plugin.planner.step_costs import Step, StepCosts

# Steps of a size of batch that are looked back on; contexts and the machine's load change.
MEMORY = 512
# Costs of a size are worked out again when there are more by one in so many of its steps.
RENEWED_BY = 16
# Steps of the same requests, after which their context is counted again.
COUNTED_EVERY = 16
# Newest steps of a depth that `state` tells the median of.
TOLD = 9


def size_of(requests: int) -> int:
    """0 for one request, 1 for 2, 2 for up to 4, 3 for up to 8, ..."""
    return (requests - 1).bit_length()


class Pace:
    """Seconds of steps beside those that a curve has for their passes, by batch size.

    settled: steps of one kind that must have gone before one that counts. 0 where a step has ended when the next one
    begins, as on a CPU; 1 where the host prepares a step while the one before runs. clock: seconds.
    """

    def __init__(self, settled: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.settled, self._clock = settled, clock
        self._seen: dict[int, deque[Step]] = {}
        # by size: costs, of which curve they are, and steps of that size since; the same as of a context, and of which
        self._costs: dict[int, tuple[StepCosts, CostCurve]] = {}
        self._new: dict[int, int] = {}
        self._here: dict[int, tuple[StepCosts, int]] = {}
        # Whether costs may be worked out again, which takes some milliseconds.
        self.may_renew = True
        # size of the batch and depth of the step at hand
        self._kind: tuple[int, int] | None = None
        self._alike, self._broken = 0, False
        # of the step before: its kind, and how many of that kind it was the last of
        self._last: tuple[tuple[int, int] | None, int] = None, 0
        self._began = 0.0
        self._requests = self._passes = self._rows = 0
        # tokens of the requests of the step at hand, and steps until they are counted again
        self._context = self._uncounted = 0

    def interrupt(self) -> None:
        """Before the next step begins, something else runs, such as a prefill: that distance is not a step's cost."""
        self._kind, self._broken = None, True

    def begin(self, requests: int, context: Callable[[], int] = lambda: 0) -> float | None:
        """A step begins, with which the one before has ended. Returns the seconds of that, None where it counts not.
        context: counts the tokens of its requests, in some steps."""
        now, took = self._clock(), None
        settled = self._alike >= self.settled and not self._broken
        if self._kind is not None and requests == self._requests and self._rows and settled:
            took = now - self._began
            self._note(Step(took, requests, self._kind[1], self._rows, self._passes, self._context))
        self._uncounted -= 1
        if requests != self._requests or self._broken or self._uncounted <= 0:
            self._context, self._uncounted = context(), COUNTED_EVERY
        if requests != self._requests:
            self._alike = -1
        self._last = self._kind, self._alike
        self._began, self._requests, self._rows, self._broken = now, requests, 0, False
        return took

    def _note(self, step: Step) -> None:
        size = size_of(step.requests)
        self._seen.setdefault(size, deque(maxlen=MEMORY)).append(step)
        self._new[size] = self._new.get(size, 0) + 1

    def drafts(self, depth: int, passes: int) -> None:
        """How deep the step that has begun drafts, and in how many draft passes. What is said last holds."""
        self._kind, self._passes = (size_of(self._requests), depth), passes
        last, alike = self._last
        self._alike = alike + 1 if self._kind == last else 0

    def verifies(self, rows: int) -> None:
        """How many tokens the target's pass of that step has."""
        self._rows = rows

    def costs(self, curve: CostCurve, requests: int, skips: bool = False) -> StepCosts | None:
        """Of steps of so many requests, beside the curve's; None if nothing is known. skips: see StepCosts.fit.

        Batches of a size that was not seen count as those of the nearest one.
        """
        if not self._seen:
            return None
        asked = size_of(requests)
        size = min(self._seen, key=lambda one: (abs(one - asked), one))
        known = self._costs.get(size)
        due = self.may_renew and self._new[size] > len(self._seen[size]) // RENEWED_BY
        if known is None or known[1] is not curve or due:
            known = self._costs[size] = StepCosts.fit(curve, self._seen[size], skips), curve
            self._new[size] = 0
            self._here.pop(size, None)
        here = self._here.get(size)
        if here is None or here[1] != self._context:
            here = self._here[size] = known[0].at(self._context), self._context
        return here[0]

    def state(self) -> dict[str, dict[str, float]]:
        """As JSON: median seconds of the newest steps, by the largest batch of a size and by depth."""
        found: dict[str, dict[str, float]] = {}
        for size, seen in sorted(self._seen.items()):
            by_depth: dict[int, list[float]] = {}
            for step in seen:
                by_depth.setdefault(step.depth, []).append(step.seconds)
            found[str(2**size)] = {str(depth): median(took[-TOLD:]) for depth, took in sorted(by_depth.items())}
        return found
