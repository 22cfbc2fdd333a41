"""A cost curve measured on a server's own first steps."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median

from c2t_plugin.planner.curve import CostCurve

# Steps of each length in each size of batch; before them so many that only warm up.
REPEATS = 4
WARM_UP = 2


@dataclass
class CostProfile:
    """Has the first steps of every size of batch (up to 1 request, 2, 4, 8, ...) draft and verify chains of each length
    in turn, and measures them. A size between two that are known is not measured: the curve between their points is
    good enough, and such batches are often the short end of a larger one. Passes larger than any that was measured go
    on as those did that the server timed at start, if it did.

    The device is waited for in those steps only. Output does not depend on how much is verified.

    lengths: of chains, the longest one last. synchronise: waits until the device is idle. clock: seconds.
    """

    lengths: Sequence[int]
    synchronise: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter
    _steps: dict[int, int] = field(default_factory=dict)
    _samples: dict[str, list[tuple[int, float]]] = field(
        default_factory=lambda: {"verify": [], "draft": [], "draft_extend": []}
    )
    _measuring: bool = False
    _at_start: Mapping[int, float] = field(default_factory=dict)

    def seed(self, seconds: Mapping[int, float]) -> None:
        """What verify passes of so many tokens took before there were requests. Only how they differ is used, since
        steps do more than those passes did."""
        self._at_start = dict(sorted(seconds.items()))

    def length(self, requests: int) -> int | None:
        """To be asked before each step: the length that all its chains are to have, or None."""
        size = (requests - 1).bit_length()
        done = self._steps.get(size, 0)
        known = [each for each, steps in self._steps.items() if steps >= self.steps_per_size]
        if done >= self.steps_per_size or (known and min(known) < size < max(known)):
            self._measuring = False
            return None
        self._measuring = done >= WARM_UP
        self._steps[size] = done + 1
        return self.lengths[done % len(self.lengths)]

    @property
    def steps_per_size(self) -> int:
        """Steps until a size of batch is known."""
        return WARM_UP + REPEATS * len(self.lengths)

    @contextmanager
    def timed(self, part: str, count: Callable[[], int], passes: int = 1) -> Iterator[None]:
        """Measure what happens within, if the step is measured.

        part: verify, draft or draft_extend. count: asked afterwards, the tokens of a verify pass, else the requests.
        passes: that it consists of; of none there is nothing to measure.
        """
        if not (self._measuring and passes):
            yield
            return
        self.synchronise()
        started = self.clock()
        yield
        self.synchronise()
        self.took(part, count(), (self.clock() - started) / passes)

    def took(self, part: str, count: int, seconds: float) -> None:
        """As `timed`, of one pass that somebody else has measured."""
        if self._measuring:
            self._samples[part].append((count, seconds))

    def curve(self) -> CostCurve | None:
        """What is known so far; None until a size of batch is."""
        known = any(done >= self.steps_per_size for done in self._steps.values())
        if not known or not all(self._samples.values()):
            return None
        return CostCurve(
            verify=_two(self._continued(_least(_points(self._samples["verify"])))),
            draft=_two(_least(_points(self._samples["draft"]))),
            draft_extend=median(seconds for _, seconds in self._samples["draft_extend"]),
        )

    def _continued(self, points: dict[int, float]) -> dict[int, float]:
        largest = max(points)
        beyond = {count: seconds for count, seconds in self._at_start.items() if count > largest}
        if beyond:
            there = _between(self._at_start, largest)
            points |= {count: max(points[largest], points[largest] + s - there) for count, s in beyond.items()}
        return points


def _points(samples: Sequence[tuple[int, float]]) -> dict[int, float]:
    """One point of every REPEATS or more samples of neighbouring counts: a single odd measurement would bend all."""
    groups: list[list[tuple[int, float]]] = [[]]
    for sample in sorted(samples):
        if len(groups[-1]) >= REPEATS and sample[0] != groups[-1][-1][0]:
            groups.append([])
        groups[-1].append(sample)
    return {round(mean(count for count, _ in group)): median(s for _, s in group) for group in groups}


def _least(points: Mapping[int, float]) -> dict[int, float]:
    """No point above one of a larger count: it was measured while something else slowed the machine. Pooled with its
    neighbours it would make all of them alike, and drafting look free."""
    found, least = {}, math.inf
    for count in sorted(points, reverse=True):
        found[count] = least = min(least, points[count])
    return dict(sorted(found.items()))


def _two(points: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """At least two, rising: of one size only, no larger batch is known to cost more."""
    if len(points) == 1:
        points = points | {2 * count: seconds for count, seconds in points.items()}
    return tuple(sorted(points.items()))


def _between(points: Mapping[int, float], at: int) -> float:
    """On the line between two points, rising counts of which one is not below `at`; left of the first, as there."""
    counts = list(points)
    right = bisect_left(counts, at)
    left = max(right - 1, 0)
    share = (at - counts[left]) / (counts[right] - counts[left]) if right else 0.0
    return points[counts[left]] + share * (points[counts[right]] - points[counts[left]])
