"""What a server's check at start found on its GPU, as rows of results: differences beside their bounds, and times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.report.rows import BenchRow

SCENARIO = "gpu-self-check"
ROWS = "self-check.jsonl"


def rows_of(
    state: Mapping[str, Any],
    arm: str,
    kind: str,
    setting: Mapping[str, str | int | float | None],
    run: Mapping[str, Any],
) -> list[BenchRow]:
    """One row of the check, with what was wrong in place of its figures; one of each kernel; and one of each number of
    packed rows that was timed. state: a C2T server's. kind, setting, run: as of BenchRow. A server on a CPU does not
    check itself: no rows.
    """
    configuration = state.get("configuration", {})
    found = configuration.get("self_check")
    # before a check it is what was asked for
    if not isinstance(found, Mapping):
        fault = "the server's state has no check at start"
        return [BenchRow(SCENARIO, kind, arm, setting, {}, fault, run)] if kind == "measured" else []
    setting = {**setting, **{name: configuration.get(name) for name in ("attention", "packing")}}
    fault = "; ".join(_faults(found, configuration.get("packing")))
    made = [BenchRow(SCENARIO, kind, arm, setting, {} if fault else _figures(found), fault, run)]
    for name, kernel in found["checked"].items():
        figures = {"off": _finite(kernel["error"]), "allowed": kernel["allowed"], "us": kernel["microseconds"]}
        failure = kernel["failure"]
        made.append(
            BenchRow(SCENARIO, kind, arm, {**setting, "kernel": name}, {} if failure else figures, failure, run)
        )
    for rows, packed in found["microseconds"].items():
        window = found["window_microseconds"][rows]
        times = {"packed_us": packed, "window_us": window, "packed_share": packed / window}
        made.append(BenchRow(SCENARIO, kind, arm, {**setting, "rows": int(rows)}, times, "", run))
    return made


def _faults(found: Mapping[str, Any], packing: str | None) -> Iterable[str]:
    """What was wrong, and what was to be tried and was not."""
    draft = found["draft"]
    yield from (*found["failures"], *found["kernels"])
    yield from (draft[name] for name in ("off", "untried") if name in draft)
    if found["skipped"] and packing != "off":
        yield found["skipped"]


def _figures(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Of logits: how far packed rows are from windows, and how far they may be, in the size that came nearest to it."""
    off, allowed = (_finite(found[name]) if found["proved"] else None for name in ("worst", "allowed"))
    return {
        "logits_off": off,
        "logits_allowed": allowed,
        "sizes_proved": found["proved"],
        "sizes": found["tiers"],
        "drafts_compared": found["draft"]["compared"],
        "seconds": found["seconds"],
    }


def _finite(number: float | None) -> float | None:
    """None for what JSON has no number for."""
    return number if number is not None and math.isfinite(number) else None
