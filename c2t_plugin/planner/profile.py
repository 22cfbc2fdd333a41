"""A cost curve measured on a server's own first steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
    good enough, and such batches are often the short end of a larger one.

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
            verify=_points(self._samples["verify"]),
            draft=_points(self._samples["draft"]),
            draft_extend=median(seconds for _, seconds in self._samples["draft_extend"]),
        )


def _points(samples: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """One point of every REPEATS or more samples of neighbouring counts: a single odd measurement would bend all."""
    groups: list[list[tuple[int, float]]] = [[]]
    for sample in sorted(samples):
        if len(groups[-1]) >= REPEATS and sample[0] != groups[-1][-1][0]:
            groups.append([])
        groups[-1].append(sample)
    points = {round(mean(count for count, _ in group)): median(s for _, s in group) for group in groups}
    if len(points) == 1:
        # of one size only: no larger batch is known to cost more
        points |= {2 * count: seconds for count, seconds in points.items()}
    return tuple(sorted(points.items()))
