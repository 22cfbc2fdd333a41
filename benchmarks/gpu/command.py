"""The standing GPU run: test every kernel on the GPU, then time it, write rows and print a table, in under 9 minutes.

    python -m benchmarks.gpu --out OUT                        the kernels' tests, then every part that times kernels
    python -m benchmarks.gpu --out OUT --parts stats table5   tests, then some parts
    python -m benchmarks.gpu --out OUT --parts ladder --no-tests
                                                              what has to hold in SGLang before its speed means
                                                              anything; ladder-trees: of trees
    python -m benchmarks.gpu --out OUT --parts serving --no-tests
                                                              SGLang end to end with a target of realistic cost;
                                                              serving-trees: trees there
    python -m benchmarks.gpu --out OUT --parts vllm --no-tests
                                                              vLLM's arms, or what they would need
    python -m benchmarks.gpu --sglang DIR ...                 within the environment of a carried SGLang
    python -m benchmarks.gpu --out OUT --dry-run              tiny shapes on the CPU, no times: the script works

Each part is a process of its own and goes on after the failure of another. A provider that fails its check is not
timed: its row says what was wrong. Then, and where a part or the tests failed, the exit status is 1. What a part
compares with and the machine lacks is printed as absent. docs/benchmarking.md says what to carry to a bare machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.goals import goals
from benchmarks.gpu.part import PARTS, GpuRow, append
from benchmarks.gpu.rungs import NUMBERS
from c2t_plugin.provenance import RunRecord

ROWS = "gpu.jsonl"
# The providers whose bandwidth is printed beside the time
OURS = ("copy", "fused")
# The rungs of trees, which have a part of their own: all servers do not fit in one
TREES = "R14"
# Parts that start servers, by the script that does, which has rows of its own.
SERVERS = {
    "serving": ("benchmarks.gpu.serving",),
    "serving-8k": ("benchmarks.gpu.serving",),
    "serving-trees": ("benchmarks.gpu.serving", "--compare", "trees"),
    "ladder": ("benchmarks.gpu.ladder", "--rungs", *(number for number in NUMBERS if number != TREES)),
    "ladder-trees": ("benchmarks.gpu.ladder", "--rungs", TREES),
    "vllm": ("benchmarks.gpu.vllm",),
}
# tokens in front of every prompt
PREFIXES = {"serving": "512", "serving-8k": "8192", "serving-trees": "512"}
# Nine minutes less what starting processes takes
TOTAL_S = 520.0
TESTS_S = 200.0
TEST_PROCESSES = 6
AHEAD_OF_TIME = "tests/kernels/test_ahead_of_time.py"
# For the measurement that is under way when a part's time ends
GRACE_S = 20.0
# FlashInfer compiles its top-k for minutes when it is first called
BUILD_LOG = "flashinfer-build.log"
BUILD = "from flashinfer.topk import get_topk_module; get_topk_module()"


@dataclass(frozen=True)
class Outcome:
    """How a child process ended: fault is empty if it did well."""

    name: str
    fault: str


def main(argv: list[str]) -> int:
    """Run the script and return its exit status."""
    carried = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    carried.add_argument("--sglang", type=Path)
    folder, rest = carried.parse_known_args(argv)
    return within(folder.sglang, rest) if folder.sglang else run(rest)


def within(folder: Path, argv: list[str]) -> int:
    """Run the script anew in the environment that the env.sh of a carried SGLang makes."""
    script = folder.resolve() / "env.sh"
    if not script.is_file():
        print(f"{folder} has no env.sh: unpack the carried SGLang there first", file=sys.stderr)
        return 2
    source = ["bash", "-c", 'source "$0" && exec "$@"', str(script)]
    return subprocess.call([*source, sys.executable, "-m", "benchmarks.gpu", *argv])


def run(argv: list[str]) -> int:
    """Everything, in this environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and logs")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, *SERVERS], default=list(PARTS), help="what to measure")
    parser.add_argument("--no-tests", action="store_true", help="skip the kernel tests")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="of all parts and tests together")
    parser.add_argument("--sglang", help="folder of a carried SGLang, whose env.sh is sourced first")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, no times")
    options = parser.parse_args(argv)
    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA GPU here; --dry-run shows that the script works", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    rows_file = options.out / ROWS
    # servers' parts write none there, and leave those of an earlier call alone
    kernels = not set(options.parts).isdisjoint(PARTS)
    if kernels:
        rows_file.unlink(missing_ok=True)
    deadline = time.monotonic() + options.seconds
    outcomes = []
    with flashinfer_build(not options.dry_run and "stats" in options.parts, options.out):
        if not options.no_tests and not options.dry_run:
            outcomes += kernel_tests(options.out)
        outcomes += run_parts(options, deadline)
    rows = read(rows_file) if kernels else []
    print_table(rows)
    for line in goals(rows):
        print(line)
    return report(rows, outcomes)


@contextlib.contextmanager
def flashinfer_build(wanted: bool, out: Path) -> Iterator[None]:
    """Let FlashInfer compile its top-k beside the tests, which leave the processor's cores idle."""
    if not wanted or find_spec("flashinfer") is None:
        yield
        return
    with (out / BUILD_LOG).open("w", encoding="utf-8") as log:
        build = subprocess.Popen(
            [sys.executable, "-c", BUILD], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(build.pid, 9)
        build.wait()


def kernel_tests(out: Path) -> list[Outcome]:
    """Run tests/kernels, and beside it what is compiled ahead of time, which needs no GPU, on the processor's cores."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # the first launch of every kernel is a compilation of a second or so on one core
    spread = ["-n", str(TEST_PROCESSES)] if find_spec("xdist") else []
    commands = {
        "tests": [*pytest, *spread, "tests/kernels", "--ignore", AHEAD_OF_TIME],
        "ahead_of_time": [*pytest, *spread, AHEAD_OF_TIME],
    }
    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(lambda name: child(name, commands[name], out, TESTS_S), commands))


def part_command(part: str, options: argparse.Namespace, seconds: float) -> list[str]:
    """Command line of one part."""
    if part in SERVERS:
        command = [sys.executable, "-m", *SERVERS[part], "--out", str(options.out)]
        # a tiny pair reads no long prompts
        if part in PREFIXES and not options.dry_run:
            command += ["--prefix", PREFIXES[part]]
    else:
        command = [sys.executable, "-m", "benchmarks.gpu.part", part, "--rows", str(options.out / ROWS)]
    return [*command, "--seconds", f"{seconds:.0f}", *(["--dry-run"] if options.dry_run else [])]


def run_parts(options: argparse.Namespace, deadline: float) -> Iterator[Outcome]:
    """Every part in turn, each with its share of the time that is left."""
    run = RunRecord.capture(seed=0).to_json()
    for place, part in enumerate(options.parts):
        seconds = max(0.0, deadline - time.monotonic()) / (len(options.parts) - place)
        outcome = child(part, part_command(part, options, seconds), options.out, seconds + GRACE_S)
        if part in SERVERS:
            print((options.out / f"{part}.log").read_text(encoding="utf-8", errors="replace"))
        elif outcome.fault:
            append(options.out / ROWS, GpuRow(part, "", {}, run, fault=outcome.fault))
        yield outcome


def child(name: str, command: list[str], out: Path, seconds: float) -> Outcome:
    """Run a command for at most so long, its output in OUT/name.log. The whole of its session is ended with it."""
    log = out / f"{name}.log"
    path = filter(None, ["kernels", ".", os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with log.open("w", encoding="utf-8") as handle:
        process = subprocess.Popen(
            command, stdout=handle, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"])[-1]
    if code == 0:
        return Outcome(name, "")
    ended = f"not done after {seconds:.0f} s" if code is None else f"ended with {code}"
    return Outcome(name, f"{ended}; {log.name} ends with: {last[:200]}")


def read(path: Path) -> list[GpuRow]:
    """All rows; none if no part wrote any."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [GpuRow(**json.loads(line)) for line in lines]


def print_table(rows: list[GpuRow]) -> None:
    """A line for each shape, its times side by side, and one for each reason that a time is missing."""
    shapes: dict[str, list[str]] = {}
    missing: dict[str, list[str]] = {}
    for row in rows:
        case = f"{row.part:<10}{' '.join(f'{name}={value}' for name, value in row.shape.items())}"
        if row.fault or row.absent:
            what = row.fault or f"absent: {row.absent}"
            missing.setdefault(f"{row.part:<10}{row.provider}: {what}", []).append(case)
            continue
        us = "" if row.us is None else f" {row.us:.2f} us"
        speed = "" if row.gb_per_s is None else f" ({row.gb_per_s:.0f} GB/s, {row.of_copy or 0:.0%})"
        cached = " from cache" * bool(row.cached)
        shapes.setdefault(case, []).append(f"{row.provider}{us}{speed * (row.provider in OURS)}{cached}")
    for case, times in shapes.items():
        print(f"{case:<50}{', '.join(times)}")
    for reason, cases in missing.items():
        print(f"{reason} ({len(cases)} shapes, first {cases[0].split(maxsplit=1)[-1]})")


def report(rows: list[GpuRow], outcomes: list[Outcome]) -> int:
    """Say what failed; the exit status."""
    wrong = [row for row in rows if row.fault]
    absent = sorted({row.provider for row in rows if row.absent})
    failed = [outcome for outcome in outcomes if outcome.fault]
    for outcome in failed:
        print(f"FAILED: {outcome.name}: {outcome.fault}")
    print(f"{len(rows)} rows, {len(wrong)} with a fault; absent: {', '.join(absent) or 'nothing'}")
    return int(bool(wrong or failed))
