"""The standing GPU run: test every kernel on the GPU, then time it, write rows and print a table, in under 9 minutes.

    python -m benchmarks.gpu --out OUT                 tests, then every part
    python -m benchmarks.gpu --out OUT --parts stats   tests, then some parts
    python -m benchmarks.gpu --out OUT --dry-run       tiny shapes on the CPU's references, no times: the script works

A provider that fails its check is not timed: its row says what was wrong, and the exit status is 1. Rows go to
OUT/gpu.jsonl; publish them by appending them to benchmarks/results/gpu.jsonl. The machine needs torch, triton, numpy,
safetensors, pytest and hypothesis, and `PYTHONPATH=kernels:.` where C2T is not installed. What else a part compares
with is timed if it can be imported, and has to be carried to a machine that lacks it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import Case, Provider, stats_cases
from benchmarks.gpu_chains import chain_cases
from benchmarks.gpu_table5 import table5_cases
from benchmarks.gpu_trees import attention_cases, growth_cases
from benchmarks.timing import cache_bytes, copies_to_outgrow_cache, eager_us, graph_us
from c2t_plugin.provenance import RunRecord

PARTS: dict[str, Callable[[torch.device, bool], Iterator[Case]]] = {
    "stats": stats_cases,
    "chain": chain_cases,
    "growth": growth_cases,
    "attention": attention_cases,
    "table5": table5_cases,
}
ROWS = "gpu.jsonl"
# together under nine minutes
TESTS_S = 240.0
TIMING_S = 270.0
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class GpuRow:
    """One provider on one shape.

    us: median microseconds, None where it was not timed. captured: whether inside a CUDA graph. gb_per_s: the bytes
    that the operation must move over that time. of_copy: that over the bandwidth of a copy in the same run, which
    counts bytes read and written. error: largest absolute difference from the reference; fault: why there is no time.
    """

    part: str
    provider: str
    shape: Mapping[str, int | str]
    us: float | None
    captured: bool | None
    gb_per_s: float | None
    of_copy: float | None
    error: float | None
    fault: str
    run: Mapping[str, Any]


def main() -> int:
    """Run the script and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and logs")
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS), help="what to time")
    parser.add_argument("--no-tests", action="store_true", help="skip the kernel tests")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, no times")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("no CUDA GPU here; --dry-run shows that the script works", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = not arguments.no_tests and not arguments.dry_run and not kernel_tests(arguments.out)
    deadline = time.monotonic() + TIMING_S
    rows = []
    with (arguments.out / ROWS).open("w", encoding="utf-8") as handle:
        for row in measure(arguments.parts, arguments.dry_run, deadline):
            rows.append(row)
            handle.write(json.dumps(asdict(row), sort_keys=True) + "\n")
            handle.flush()
    print_table(rows)
    wrong = [row for row in rows if row.fault]
    print(
        f"{len(rows)} rows, {len(wrong)} with a fault; kernel tests {'FAILED' if failed else 'passed or not asked for'}"
    )
    return int(failed or bool(wrong))


def kernel_tests(out: Path) -> bool:
    """Run tests/kernels on the GPU; the log goes beside the rows. What is compiled ahead of time needs no GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/kernels", "-p", "no:cacheprovider"]
    command += ["--ignore", "tests/kernels/test_ahead_of_time.py"]
    log = out / "kernel_tests.log"
    with log.open("w", encoding="utf-8") as handle:
        try:
            done = subprocess.run(
                command,
                stdout=handle,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": "kernels:."},
                timeout=TESTS_S,
            )
        except subprocess.TimeoutExpired:
            print(f"kernel tests: not done after {TESTS_S:.0f} s")
            return False
    print("\n".join(log.read_text(encoding="utf-8").splitlines()[-3:]))
    return done.returncode == 0


def measure(parts: list[str], dry_run: bool, deadline: float) -> Iterator[GpuRow]:
    """Rows of the parts, until the time is used up; what was left out gets a row that says so."""
    run = RunRecord.capture(seed=0).to_json()
    copy = None if dry_run else copy_gb_per_s()
    if copy is not None:
        yield GpuRow("copy", "torch", {"bytes": COPY_BYTES}, None, True, copy, 1.0, None, "", run)
    device = torch.device("cpu" if dry_run else "cuda")
    for part in parts:
        for case in PARTS[part](device, dry_run):
            for provider in case.providers:
                if time.monotonic() > deadline:
                    yield _row(part, case, provider, run, fault="not run: out of time")
                else:
                    yield measure_one(part, case, provider, run, copy)
            if not dry_run:
                torch.cuda.empty_cache()


def measure_one(part: str, case: Case, provider: Provider, run: Mapping[str, Any], copy: float | None) -> GpuRow:
    """Check a provider against the case's reference; time it if it is right. copy: GB/s, None in a dry run."""
    # twice from one seed: an operation that writes into its arguments must not find the reference's answer there
    expected = case.reference(*case.inputs(torch.Generator(case.device).manual_seed(0)))
    generator = torch.Generator(case.device).manual_seed(0)
    inputs = [case.inputs(generator)]
    error = case.error(expected, provider.run(*inputs[0]))
    if not error <= case.tolerance:
        return _row(part, case, provider, run, error=error, fault=f"error {error:.3g}, allowed {case.tolerance:.3g}")
    if copy is None:
        return _row(part, case, provider, run, error=error)
    copies = copies_to_outgrow_cache(case.input_bytes, cache_bytes())
    inputs += [case.inputs(generator) for _ in range(copies - 1)]
    calls = [_bound(provider, each) for each in inputs]
    for call in calls:
        call()
    us = (graph_us if provider.captures else eager_us)(calls)
    speed = case.bytes_moved / us / 1e3
    return GpuRow(part, provider.name, case.shape, us, provider.captures, speed, speed / copy, error, "", run)


def _bound(provider: Provider, inputs: tuple[Any, ...]) -> Any:
    return lambda: provider.run(*inputs)


def _row(
    part: str, case: Case, provider: Provider, run: Mapping[str, Any], *, error: float | None = None, fault: str = ""
) -> GpuRow:
    return GpuRow(part, provider.name, case.shape, None, None, None, None, error, fault, run)


def copy_gb_per_s() -> float:
    """Bandwidth of a device-to-device copy, bytes read and bytes written both counted."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / graph_us([lambda: target.copy_(source)]) / 1e3


def print_table(rows: list[GpuRow]) -> None:
    """One line a row, as short as the end of a log must be."""
    for row in rows:
        shape = " ".join(f"{name}={value}" for name, value in row.shape.items())
        us = "" if row.us is None else f"{row.us:9.2f} us"
        speed = "" if row.gb_per_s is None else f"{row.gb_per_s:7.0f} GB/s {row.of_copy or 0:5.0%}"
        print(f"{row.part:<10}{row.provider:<22}{shape:<44}{us:<13}{speed:<18}{row.fault}")


if __name__ == "__main__":
    sys.exit(main())
