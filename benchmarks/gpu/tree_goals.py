"""What C2T's trees are meant to reach on an H200, and what they reached, from the rows of benchmarks/gpu/serving.py.

The goals are wishes written down before anything was measured; a missed one fails no run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.gpu.contests import C2T_CHAIN, C2T_TREE, EAGLE_TREE
from benchmarks.report.rows import BenchRow
from benchmarks.report.tables import load_of, table
from c2t_plugin.lab.curves import gamma_at

GAMMA_GOAL = 0.75
BATCHES = (2, 16)
# of decoding at full batches: over a whole pass the prefill of its prompts would hide it
SPEED = "decode_tokens_per_s"
COLUMNS = {"tau": ".2f", "gamma": ".1f", "decode_step_ms": ".2f", SPEED: ".0f", "output_tokens_per_s": ".0f"}
TITLES = (
    "accepted draft tokens a step",
    "verified tokens",
    "ms per decode step",
    "decoded tokens/s",
    "output tokens/s with prefill",
)
HEADER = ("arm", "concurrency", *TITLES)

Found = Mapping[tuple[str, int], Mapping[str, float | None]]


def summary(rows: Sequence[BenchRow]) -> str:
    """A table of every pass that ran, and a line for each goal that measured rows can judge."""
    ran = {(row.arm, load_of(row)): row for row in rows if "output_tokens_per_s" in row.metrics}
    found = {key: row.metrics for key, row in ran.items()}
    measured = {
        key: row.metrics for key, row in ran.items() if row.kind == "measured" and row.metrics.get(SPEED) is not None
    }
    lines = (
        [arm, str(load), *(_figure(metrics.get(name), form) for name, form in COLUMNS.items())]
        for (arm, load), metrics in found.items()
    )
    return "\n".join([table(HEADER, lines), *_one_request(measured), *_batches(measured)])


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _of(found: Found, arm: str, load: int) -> dict[str, Mapping[str, float]]:
    """Metrics of the arms of this kind, by their names."""
    return {
        name: metrics  # type: ignore[misc]
        for (name, at), metrics in found.items()
        if name.startswith(arm) and at == load and metrics["tau"] is not None
    }


def _one_request(found: Found) -> Iterator[str]:
    """Verified tokens at EAGLE-2's accept length, between betas and node limits; the speed of what accepts as much."""
    ours = list(_of(found, C2T_TREE, 1).values())
    tau, gamma = (np.array([metrics[name] for metrics in ours]) for name in ("tau", "gamma"))
    for name, theirs in _of(found, EAGLE_TREE, 1).items() if ours else ():
        share = float(gamma_at(tau, gamma, theirs["tau"])) / theirs["gamma"]
        reached = f"{share:.2f}x" if np.isfinite(share) else "no C2T tree accepts so many"
        yield _goal(
            f"verified tokens at most {GAMMA_GOAL:g}x of {name}'s at its accept length, one request",
            share <= GAMMA_GOAL,
            reached,
        )
        fast = [m[SPEED] for m in ours if m["tau"] >= theirs["tau"]]
        ratio = max(fast, default=0.0) / theirs[SPEED]
        reached = f"{ratio:.2f}x" if fast else "no C2T tree accepts so many"
        yield _goal(
            f"as many decoded tokens/s as {name} with at least its accept length, one request", ratio >= 1, reached
        )


def _batches(found: Found) -> Iterator[str]:
    """C2T's trees against the better of its chains and SGLang's trees."""
    for load in sorted({load for _, load in found if BATCHES[0] <= load <= BATCHES[1]}):
        ours, chains, trees = (_of(found, arm, load) for arm in (C2T_TREE, C2T_CHAIN, EAGLE_TREE))
        if ours and chains and trees:
            rivals = {**chains, **trees}
            best = max(rivals, key=lambda name: rivals[name][SPEED])
            speed = max(metrics[SPEED] for metrics in ours.values())
            ratio = speed / rivals[best][SPEED]
            goal = f"as many decoded tokens/s as the better of C2T's chains and SGLang's trees, {load} requests"
            yield _goal(goal, ratio >= 1, f"{ratio:.2f}x of {best}")


def _goal(goal: str, met: bool, reached: str) -> str:
    return f"goal: {goal}: {'met' if met else 'missed'} ({reached})"
