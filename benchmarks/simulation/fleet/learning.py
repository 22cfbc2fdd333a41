"""How soon what replicas learn of their target is as good as it gets, alone and together: from published rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.report.rows import BenchRow
from benchmarks.simulation.fleet.speeds import Speeds
from benchmarks.simulation.learning import MARKS, NOTHING, SCENARIO

LEARNING = "fleet-learning"
# of the nats that there are to learn, at which a fit counts as learnt
NEARLY = 0.9
ALONE, TOGETHER = "each for itself", "together"


def states_needed(rows: Sequence[BenchRow], stream: str, arm: str, poisoned: int = 0) -> int:
    """The first of MARKS at which an arm of a stream has NEARLY all that it learns in the end."""
    found = {
        int(row.setting["states"] or 0): row.metrics["nll"] or 0.0
        for row in rows
        if row.scenario == SCENARIO and row.arm == arm and row.setting["stream"] == stream
        if row.setting["poisoned"] == poisoned
    }
    first, last = found[0], min(found.values())
    return next(mark for mark in MARKS if first - found[mark] >= NEARLY * (first - last))


def drafts_per_s(speeds: Speeds, requests: int) -> float:
    """Drafts that a replica verifies in a second while so many requests run: each gives tau + 1 tokens."""
    return requests * speeds.rates[requests] / (speeds.tau[requests] + 1)


def learning_rows(
    rows: Sequence[BenchRow],
    speeds: Speeds,
    stream: str,
    fleets: Sequence[int],
    loads: Sequence[int],
    labels: Mapping[str, Any],
    run: Mapping[str, Any],
) -> Iterator[BenchRow]:
    """Seconds until every replica has learnt, that started from the draft's own probabilities.

    fleets: numbers of replicas. loads: requests that each has at once. Together each learns from the drafts of all.
    """
    needed = states_needed(rows, stream, f"from {NOTHING}")
    for load in loads:
        alone = needed / drafts_per_s(speeds, load)
        for replicas in fleets:
            for arm, seconds in ((ALONE, alone), (TOGETHER, alone / replicas)):
                label = {**labels, "stream": stream, "replicas": replicas, "requests_in_flight": load}
                yield BenchRow(LEARNING, "simulated", arm, label, {"seconds": seconds, "states": needed}, "", run)
