"""A cost curve measured on a server's own first steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from c2t_plugin.errors import ConfigError
from c2t_plugin.planner.curve import LEAST_SECONDS, MOST_COUNT, MOST_SECONDS, CostCurve

# Steps of each length in each size of batch; before them so many that only warm up.
REPEATS = 4
WARM_UP = 2
# Draft tokens of a request up to which each number of them is measured.
EACH = 8
# Of a size of batch between two that are known one step in so many is measured.
BETWEEN = 32
# Rounds of telling a cycle's speed by what each length usually takes, and that by the speeds.
ROUNDS = 3


def lengths_to(most: int) -> Sequence[int]:
    """Of chains or trees of at most so many draft tokens, those that are measured: all of few, of many each twice the
    one before. Every one costs REPEATS steps that wait for the device, in each size of batch."""
    return range(most + 1) if most <= EACH else (0, *(1 << power for power in range((most - 1).bit_length())), most)


class Sample(NamedTuple):
    """One pass. tokens: of a verify pass, else requests. kind: size of the batch and length of its chains. cycle: that
    size, and which round of all lengths."""

    tokens: int
    seconds: float
    kind: tuple[int, int]
    cycle: tuple[int, int]

    @classmethod
    def of(cls, tokens: Any, seconds: Any, size: Any, length: Any, cycle: Any) -> Sample:
        """Of a row of CostProfile.measured. Raises ValueError for what is none."""
        counted = all(type(each) is int and 0 <= each <= MOST_COUNT for each in (tokens, size, length, cycle))
        if not (counted and tokens and type(seconds) is float and LEAST_SECONDS <= seconds <= MOST_SECONDS):
            raise ValueError(f"no pass is {(tokens, seconds, size, length, cycle)}")
        return cls(tokens, seconds, (size, length), (size, cycle))


@dataclass
class CostProfile:
    """Has the first steps of every size of batch (up to 1 request, 2, 4, 8, ...) draft and verify chains of each length
    in turn, and measures them. Of a size between two that are known it is one step in BETWEEN: such batches are often
    the short end of a larger one, for which the curve between their points will do. Passes larger than any that was
    measured go on as those did that the server timed at start, if it did.

    The device is waited for in those steps only. Output does not depend on how much is verified.

    lengths: of chains, the longest one last. synchronise: waits until the device is idle. clock: seconds.
    """

    lengths: Sequence[int]
    synchronise: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter
    _steps: dict[int, int] = field(default_factory=dict)
    _passed: dict[int, int] = field(default_factory=dict)
    _samples: dict[str, list[Sample]] = field(default_factory=lambda: {"verify": [], "draft": [], "draft_extend": []})
    # of the step that is measured
    _kind: tuple[int, int] = (0, 0)
    _cycle: tuple[int, int] = (0, 0)
    _measuring: bool = False
    _at_start: Mapping[int, float] = field(default_factory=dict)

    def seed(self, seconds: Mapping[int, float]) -> None:
        """What verify passes of so many tokens took before there were requests. Only how they differ is used, since
        steps do more than those passes did."""
        self._at_start = dict(sorted(seconds.items()))

    def length(self, requests: int) -> int | None:
        """To be asked before each step: the length that all its chains are to have, or None."""
        size, known = (requests - 1).bit_length(), self.sizes
        done = self._steps.get(size, 0)
        wanted = done < self.steps_per_size
        if wanted and known and min(known) < size < max(known):
            self._passed[size] = self._passed.get(size, 0) + 1
            wanted = self._passed[size] % BETWEEN == 0
        self._measuring = wanted and done >= WARM_UP
        if not wanted:
            return None
        self._steps[size] = done + 1
        length = self.lengths[done % len(self.lengths)]
        self._kind, self._cycle = (size, length), (size, (done - WARM_UP) // len(self.lengths))
        return length

    def skip(self) -> None:
        """The step at hand has another length than it was to have: that one is asked for again."""
        self._steps[self._kind[0]] -= 1
        self._measuring = False

    @property
    def sizes(self) -> list[int]:
        """Sizes of batch that are known: 0 for one request, 1 for 2, 2 for up to 4, ..."""
        return [size for size, done in self._steps.items() if done >= self.steps_per_size]

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
            self._samples[part].append(Sample(count, seconds, self._kind, self._cycle))

    def curve(self) -> CostCurve | None:
        """Of the sizes of batch that are known; None until one is."""
        known = self._of_known_sizes()
        if not all(known.values()):
            return None
        speeds = _speeds(known["verify"])
        verify, draft, extend = (
            # a cycle whose passes of the target were never measured tells no speed
            [(each.tokens, each.seconds / speeds.get(each.cycle, 1.0)) for each in samples]
            for samples in known.values()
        )
        return CostCurve(
            verify=_two(self._continued(_points(verify))),
            draft=_two(_points(draft)),
            draft_extend=median(seconds for _, seconds in extend),
        )

    def measured(self) -> dict[str, list[list[float]]]:
        """As JSON: of each pass in a size of batch that is known tokens, seconds, and the size, length and cycle."""
        return {
            part: [[each.tokens, float(each.seconds), *each.kind, each.cycle[1]] for each in samples]
            for part, samples in self._of_known_sizes().items()
        }

    def _of_known_sizes(self) -> dict[str, list[Sample]]:
        known = self.sizes
        return {part: [each for each in those if each.kind[0] in known] for part, those in self._samples.items()}

    def resumed(self, measured: Any) -> CostProfile:
        """A profile that goes on from what another one with these lengths has `measured`. Raises ConfigError where
        that is something else."""
        try:
            samples = {part: [Sample.of(*row) for row in measured[part]] for part in self._samples}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"these are no passes of a server: {error}") from error
        if not all(samples.values()):
            raise ConfigError(f"passes are missing: there are {', '.join(part for part in samples if samples[part])}")
        return replace(self, _samples=samples, _steps={each.kind[0]: self.steps_per_size for each in samples["verify"]})

    def _continued(self, points: dict[int, float]) -> dict[int, float]:
        largest = max(points)
        beyond = {count: seconds for count, seconds in self._at_start.items() if count > largest}
        if beyond:
            there = float(np.interp(largest, list(self._at_start), list(self._at_start.values())))
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


def _speeds(samples: Sequence[Sample]) -> dict[tuple[int, int], float]:
    """How much slower the machine was in each cycle than in the middle one of its size of batch.

    Every cycle has every length once, so a cycle in which something else kept the machine busy makes no length look
    dear beside another.
    """
    cycles = _by(samples, lambda each: each.cycle)
    speeds = dict.fromkeys(cycles, 1.0)
    for _ in range(ROUNDS):
        usual = {
            kind: median(each.seconds / speeds[each.cycle] for each in alike)
            for kind, alike in _by(samples, lambda each: each.kind).items()
        }
        speeds = {cycle: median(each.seconds / usual[each.kind] for each in those) for cycle, those in cycles.items()}
    return speeds


def _by(samples: Sequence[Sample], key: Callable[[Sample], tuple[int, int]]) -> dict[tuple[int, int], list[Sample]]:
    found: dict[tuple[int, int], list[Sample]] = {}
    for each in samples:
        found.setdefault(key(each), []).append(each)
    return found


def _two(points: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """At least two, rising: of one size only, no larger batch is known to cost more."""
    if len(points) == 1:
        points = points | {2 * count: seconds for count, seconds in points.items()}
    return tuple(sorted(points.items()))
