"""What whole steps cost beside their passes, from the time between the beginnings of one step and the next.

A curve knows the passes of target and draft. A server does more: it schedules, samples, answers, and its draft reads
what was accepted. All of that is in the time from one step to the next, which costs nothing to measure.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from c2t_plugin.planner.curve import CostCurve

# Steps of a kind that are looked back on: a median of so many survives an odd one.
MEMORY = 9
# Steps of a batch size after which what a depth cost there is no longer known: contexts or the machine's load have
# changed since, and a depth that was once slow by chance would never be drafted again.
STALE = 128
# Steps of one depth that say as much about it as all depths do together.
SHARED = 3


class Kind(NamedTuple):
    """What steps are compared by. size: of the batch, see `size_of`. depth: draft tokens of a request."""

    size: int
    depth: int


class _Seen(NamedTuple):
    """One step. at: its number among those of its size. seconds: until the next one. rows: of the target's pass."""

    at: int
    seconds: float
    requests: int
    rows: int
    passes: int


def size_of(requests: int) -> int:
    """0 for one request, 1 for 2, 2 for up to 4, 3 for up to 8, ..."""
    return (requests - 1).bit_length()


class Pace:
    """Seconds of steps beside those that a curve has for their passes, by batch size and depth.

    settled: steps of one kind that must have gone before one that counts. 0 where a step has ended when the next one
    begins, as on a CPU; 1 where the host prepares a step while the one before runs. clock: seconds.
    """

    def __init__(self, settled: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._settled, self._clock = settled, clock
        self._seen: dict[Kind, deque[_Seen]] = {}
        self._kind: Kind | None = None
        self._alike = 0
        # by size, what `beside` says of each depth that it knows, until another step or curve comes; and by kind what
        # its steps cost beside their passes, until it has another one
        self._known: dict[int, dict[int, float]] = {}
        self._medians: dict[Kind, float] = {}
        self._curve: CostCurve | None = None
        # steps by size
        self._at: Counter[int] = Counter()
        self._began = 0.0
        self._requests = self._passes = self._rows = 0

    def interrupt(self) -> None:
        """Between two steps was something else, such as a prefill: their distance is not a step's cost."""
        self._kind = None

    def begin(self, requests: int) -> float | None:
        """A step begins, with which the one before has ended. Returns the seconds of that, None where it counts not."""
        now, took = self._clock(), None
        if self._kind is not None and requests == self._requests and self._rows and self._alike >= self._settled:
            took = now - self._began
            self._seen.setdefault(self._kind, deque(maxlen=MEMORY)).append(
                _Seen(self._at[self._kind.size], took, requests, self._rows, self._passes)
            )
            self._known.clear()
            self._medians.pop(self._kind, None)
        if requests != self._requests:
            self._alike = -1
        self._began, self._requests, self._rows = now, requests, 0
        self._at[size_of(requests)] += 1
        return took

    def drafts(self, depth: int, passes: int) -> None:
        """How deep the step that has begun drafts, and in how many draft passes."""
        kind = Kind(size_of(self._requests), depth)
        self._alike = self._alike + 1 if kind == self._kind else 0
        self._kind, self._passes = kind, passes

    def verifies(self, rows: int) -> None:
        """How many tokens the target's pass of that step has."""
        self._rows = rows

    def beside(self, curve: CostCurve, requests: int, depths: Sequence[int]) -> list[float] | None:
        """Seconds of a step of each depth beside the curve's for its passes; None if nothing is known.

        Batches of a size that was not seen count as those of the nearest one. The less is known of a depth, the nearer
        it is taken to the mean of all; one that was not drafted lately counts as the nearest one that was.
        """
        if not self._seen:
            return None
        if curve is not self._curve:
            self._known.clear()
            self._medians.clear()
            self._curve = curve
        asked = size_of(requests)
        known = self._known.get(asked)
        if known is None:
            size = min({kind.size for kind in self._seen}, key=lambda one: (abs(one - asked), one))
            known = self._known[asked] = self._by_depth(curve, size)
        return [known[min(known, key=lambda one: (abs(one - depth), one))] for depth in depths]

    def _by_depth(self, curve: CostCurve, size: int) -> dict[int, float]:
        """Of the depths that were drafted lately, each the nearer to the mean of all the less is known of it."""
        here = {kind: seen for kind, seen in self._seen.items() if kind.size == size}
        newest = max(seen[-1].at for seen in here.values())
        fresh = {}
        for kind, seen in here.items():
            if newest - seen[-1].at <= STALE:
                if kind not in self._medians:
                    self._medians[kind] = _median(curve, seen)
                fresh[kind.depth] = self._medians[kind], len(seen)
        shared = sum(seconds for seconds, _ in fresh.values()) / len(fresh)
        return {depth: (seconds * n + shared * SHARED) / (n + SHARED) for depth, (seconds, n) in fresh.items()}

    def state(self) -> dict[str, dict[str, float]]:
        """As JSON: median seconds of the newest steps, by the largest batch of a size and by depth."""
        found: dict[str, dict[str, float]] = {}
        for kind, seen in sorted(self._seen.items()):
            found.setdefault(str(2**kind.size), {})[str(kind.depth)] = median(step.seconds for step in seen)
        return found


def _median(curve: CostCurve, seen: Sequence[_Seen]) -> float:
    return median(
        step.seconds - curve.verify_one(step.rows) - step.passes * curve.draft_s(step.requests) for step in seen
    )
