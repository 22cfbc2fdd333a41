"""One part of the standing GPU run in a process of its own, so that its end, however bad, is no other part's.

    python -m benchmarks.gpu.part stats --rows OUT/gpu.jsonl --seconds 60     on a GPU
    python -m benchmarks.gpu.part stats --rows OUT/gpu.jsonl --dry-run        tiny shapes on the CPU, no times

benchmarks/gpu/command.py calls it. Every row is appended as soon as it is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks.gpu.cases import Case, Provider
from benchmarks.gpu.chains import chain_cases
from benchmarks.gpu.rivals import Absent
from benchmarks.gpu.stats import stats_cases
from benchmarks.gpu.table5 import table5_cases
from benchmarks.gpu.timing import (
    CALLS_PER_GRAPH,
    WARM_UP,
    cache_bytes,
    copies_to_outgrow_cache,
    eager_times,
    first_call_s,
    graph_times,
)
from benchmarks.gpu.trees import attention_cases, growth_cases
from c2t_plugin.provenance import RunRecord

# the quick ones first: what they leave of their time goes to the others
PARTS: dict[str, Callable[[torch.device, bool], Iterator[Case]]] = {
    "chain": chain_cases,
    "growth": growth_cases,
    "table5": table5_cases,
    "stats": stats_cases,
    "attention": attention_cases,
}
COPY_BYTES = 1 << 30
# What a provider raises where it is broken or does not fit this machine; the row says it and the others go on.
FAILURES = (
    *(RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError, OSError),
    *(subprocess.SubprocessError, TritonError),
)


@dataclass(frozen=True)
class GpuRow:
    """One provider on one shape.

    us: median microseconds, None where it was not timed; us_p20, us_p80: percentiles; replays: timed repetitions, which
    follow warm_up untimed ones. captured: whether inside a CUDA graph. cached: whether all
    sets of inputs together fit in the second-level cache, so that it was timed from there. gb_per_s: the bytes that the
    operation must move over that time. of_copy: that over the bandwidth of a copy in the same process, which counts
    bytes read and written. first_s: wall-clock seconds of its first call on this shape, compilation and loading
    included. error: largest absolute difference from the reference; in table5 relative to a head's output. fault: what
    went wrong, then there is no time. absent: why it cannot run on this machine, which is no fault.
    """

    part: str
    provider: str
    shape: Mapping[str, int | str]
    run: Mapping[str, Any]
    us: float | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    replays: int | None = None
    warm_up: int | None = None
    captured: bool | None = None
    cached: bool | None = None
    gb_per_s: float | None = None
    of_copy: float | None = None
    first_s: float | None = None
    error: float | None = None
    fault: str = ""
    absent: str = ""


def measure(part: str, dry_run: bool, deadline: float) -> Iterator[GpuRow]:
    """Rows of a part until time.monotonic() reaches the deadline; what was left out gets a row that says so."""
    run = RunRecord.capture(seed=0).to_json()
    copy = None if dry_run else copy_gb_per_s()
    if copy is not None:
        yield GpuRow(part, "copy", {"bytes": COPY_BYTES}, run, captured=True, gb_per_s=copy, of_copy=1.0)
    for case in PARTS[part](torch.device("cpu" if dry_run else "cuda"), dry_run):
        yield from measure_case(part, case, run, copy, deadline)
        if not dry_run:
            torch.cuda.empty_cache()


def measure_case(
    part: str, case: Case, run: Mapping[str, Any], copy: float | None, deadline: float = float("inf")
) -> Iterator[GpuRow]:
    """A row for each provider of a case. copy: bandwidth of a copy in GB/s, None in a dry run, which takes no times."""
    expected = None
    for provider in case.providers:
        row: dict[str, Any] = {"part": part, "provider": provider.name, "shape": case.shape, "run": run}
        if provider.absent:
            yield GpuRow(**row, absent=provider.absent)
        elif time.monotonic() > deadline:
            yield GpuRow(**row, fault="not run: out of time")
        else:
            try:
                if expected is None:
                    expected = case.reference(*case.inputs(torch.Generator(case.device).manual_seed(0)))
                found = measure_one(case, provider, expected, copy)
            except Absent as error:
                found = {"absent": str(error)}
            except FAILURES as error:
                first = str(error).strip().splitlines()[:1]
                found = {"fault": ": ".join([type(error).__name__, *first])[:300]}
            yield GpuRow(**row, **found)


def measure_one(case: Case, provider: Provider, expected: Any, copy: float | None) -> dict[str, Any]:
    """Fields of a provider's row: its error against the reference's result, and its time if it is right."""
    # the reference's inputs anew: an operation that writes into its arguments must not find the answer there
    generator = torch.Generator(case.device).manual_seed(0)
    calls = [_bound(provider, case, generator)]
    ours = provider.name.startswith("fused")
    with poisoned_memory() if ours else contextlib.nullcontext():
        found, first_s = (calls[0](), None) if copy is None else first_call_s(calls[0])
    error = (provider.judge or case.error)(expected, found)
    if not error <= case.tolerance:
        return {"error": error, "fault": f"error {error:.3g}, allowed {case.tolerance:.3g}"}
    if copy is None:
        return {"error": error}
    cache = cache_bytes()
    copies = copies_to_outgrow_cache(case.input_bytes, cache)
    if not provider.captures:
        # launches from Python decide, not the cache
        copies = min(copies, CALLS_PER_GRAPH)
    calls += [_bound(provider, case, generator) for _ in range(copies - 1)]
    for call in calls:
        call()
    times = (graph_times if provider.captures else eager_times)(calls)
    speed = case.bytes_moved / times.us / 1e3
    how = {"captured": provider.captures, "cached": copies * case.input_bytes <= cache, "first_s": first_s}
    timed = {**times._asdict(), "warm_up": WARM_UP}
    return {**timed, **how, "gb_per_s": speed, "of_copy": speed / copy, "error": error}


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory is NaN, or the largest number that it can hold, so that what nobody has written is wrong."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _bound(provider: Provider, case: Case, generator: torch.Generator) -> Callable[[], Any]:
    arguments = provider.prepare(*case.inputs(generator))
    return lambda: provider.run(*arguments)


def copy_gb_per_s() -> float:
    """Bandwidth of a device-to-device copy, bytes read and bytes written both counted."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / graph_times([lambda: target.copy_(source)]).us / 1e3


def append(path: Path, row: GpuRow) -> None:
    """One line more."""
    with path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(asdict(row), sort_keys=True) + "\n")


def main(argv: list[str]) -> int:
    """Measure a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--rows", type=Path, required=True, help="file to append to")
    parser.add_argument("--seconds", type=float, default=60.0, help="no measurement begins later than this")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, no times")
    options = parser.parse_args(argv)
    for row in measure(options.part, options.dry_run, time.monotonic() + options.seconds):
        append(options.rows, row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
