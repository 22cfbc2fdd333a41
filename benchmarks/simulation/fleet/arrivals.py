"""Requests in the order of their arrival: drawn, or read from a recording."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from c2t_plugin.errors import C2TError

# seconds of one quiet and one busy time, and how much of the mean rate arrives in each: 2.8 times it for a sixth of the
# time, all replicas at once
QUIET_S, BUSY_S, BUSY_RATE = 25.0, 5.0, 2.8
# least and most of the mean rate in the course of a day
NIGHT, NOON = 0.4, 1.6
# columns of a recording, as the Azure LLM inference traces have them
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Request:
    """at: seconds. own: tokens of its prompt that no other has. output: tokens, at least 1. group: whose prefix it
    begins with; prefix: tokens of that."""

    at: float
    own: int
    output: int
    group: int
    prefix: int


@dataclass(frozen=True)
class Work:
    """What requests ask for. own, output: mean tokens, log-normal with `spread`, at most four times the mean. groups:
    of requests that begin alike, equally many each. prefix: tokens of what they share."""

    own: int = 256
    output: int = 192
    spread: float = 0.8
    groups: int = 32
    prefix: int = 1024

    def draw(self, times: np.ndarray, rng: np.random.Generator) -> list[Request]:
        """A request at each time."""
        own, output = (self._lengths(mean, len(times), rng) for mean in (self.own, self.output))
        groups = rng.integers(self.groups, size=len(times))
        columns = zip(times.tolist(), own.tolist(), output.tolist(), groups.tolist(), strict=True)
        return [Request(at, mine, out, group, self.prefix) for at, mine, out, group in columns]

    def _lengths(self, mean: int, count: int, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.lognormal(np.log(mean) - self.spread**2 / 2, self.spread, count)
        return np.clip(drawn, 1, 4 * mean).astype(int)


Times = Callable[[float, float, np.random.Generator], np.ndarray]


def poisson(rate: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Times of arrival, each independent of all others."""
    return _thinned(lambda at: np.ones_like(at), 1.0, rate, seconds, rng)


def bursts(rate: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """The same with busy times of BUSY_S in between, at the same mean rate."""
    calm = (QUIET_S + BUSY_S - BUSY_RATE * BUSY_S) / QUIET_S

    def share(at: np.ndarray) -> np.ndarray:
        return np.where(at % (QUIET_S + BUSY_S) < QUIET_S, calm, BUSY_RATE)

    return _thinned(share, BUSY_RATE, rate, seconds, rng)


def day(rate: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """A day from midnight to midnight in so many seconds."""

    def share(at: np.ndarray) -> np.ndarray:
        return NIGHT + (NOON - NIGHT) * (1 - np.cos(2 * np.pi * at / seconds)) / 2

    return _thinned(share, NOON, rate, seconds, rng)


PATTERNS: Mapping[str, Times] = {"poisson": poisson, "bursts": bursts, "day": day}


def _thinned(
    share: Callable[[np.ndarray], np.ndarray], most: float, rate: float, seconds: float, rng: np.random.Generator
) -> np.ndarray:
    """Of a Poisson process at `most` times the rate, those that its share at their time keeps."""
    count = rng.poisson(most * rate * seconds)
    times = np.sort(rng.uniform(0.0, seconds, count))
    return times[rng.uniform(0.0, most, count) < share(times)]


def recorded(path: Path, work: Work, copies: int, rng: np.random.Generator) -> list[Request]:
    """The requests of a recording, a CSV file with COLUMNS, from its first on.

    copies: of it, that arrive at the same time but for some seconds: a fleet that is so many times as large. A prompt's
    tokens are those of its prefix first. C2TError for a file that is none.
    """
    try:
        rows = list(_read(path))
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise C2TError(f"{path} is no CSV file with the columns {', '.join(COLUMNS)}: {error}") from error
    if not rows:
        raise C2TError(f"{path} has no requests")
    first = rows[0][0]
    found = [
        Request(at - first + shift, max(1, context - work.prefix), max(1, output), group, min(work.prefix, context))
        for shift, salt in zip(rng.uniform(0.0, 5.0, copies).tolist(), range(copies), strict=True)
        for (at, context, output), group in zip(rows, _groups(work, len(rows), salt), strict=True)
    ]
    return sorted(found, key=lambda each: each.at)


def _groups(work: Work, count: int, salt: int) -> list[int]:
    drawn = np.random.default_rng(salt).integers(work.groups, size=count)
    return [int(group) for group in drawn]


def _read(path: Path) -> Iterator[tuple[float, int, int]]:
    with path.open(encoding="utf-8", newline="") as handle:
        for row in csv.DictReader(handle):
            time, context, output = (row[name] for name in COLUMNS)
            yield _seconds(time), int(context), int(output)


def _seconds(text: str) -> float:
    """Of a number of seconds, or of a date with more than microseconds."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text[:26]).timestamp()
