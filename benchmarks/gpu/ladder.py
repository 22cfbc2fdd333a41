"""What has to hold in SGLang on a GPU before its speed means anything, one rung after the other, with the shipped pair.

    python -m benchmarks.gpu.ladder --out OUT --seconds 500      on a GPU, float32
    python -m benchmarks.gpu.ladder --out OUT --rungs R2 R3      these alone: what crashes SGLang's own packed rows
    python -m benchmarks.gpu.ladder --out OUT --at-once 3        three servers beside each other: R10's gap grows
    python -m benchmarks.gpu.ladder --out OUT --without auto     R1 and R9 of the other servers, R12 not at all
    python -m benchmarks.gpu.ladder --out OUT --dry-run          few requests, on the CPU engine: it works

starts ten servers (plain decoding; C2T with packed rows; with graphs of few sizes; over the uniform window;
without CUDA graphs; with a planner; among aborted, retracted and chunked requests; without the overlap scheduler; trees
of kept nodes only; padded trees), asks them the same, and writes a row per rung (rungs.py) to OUT/ladder.jsonl with
what was found and, if a rung does not hold, why, once the servers that it looks at have answered. Exit status 1: a rung
does not hold, or could not be tried. Numbers of rungs stay when others are added; what the ladder leaves to other
scripts or to more GPUs is in docs/benchmarking.md.

One file, from the asking to the rows, since a rung is judged as soon as the last of its servers has answered.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.gpu import self_checks
from benchmarks.gpu.environment import plugin_environment
from benchmarks.gpu.options import part_parser
from benchmarks.gpu.rungs import NUMBERS, RUNGS, STEPS, Found, Verdict, without
from benchmarks.gpu.servers import DRAFT, GRAPHS, MOST, SERVERS, SHARED, serve
from benchmarks.pairs.toy import held_out_prompts
from benchmarks.report.recomputed import Comparison, compare, recompute
from benchmarks.report.rows import BenchRow, append_rows
from benchmarks.serving.breakdown import profiled
from benchmarks.serving.client import Pass
from benchmarks.serving.engines.sglang import NativeClient, SglangClient
from benchmarks.serving.spans import gap_ms
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord
from c2t_plugin.traces.file import SUFFIX, Traces, load_traces
from c2t_plugin.traces.recorder import WRITE_EVERY_S

ROWS = "ladder.jsonl"
SEED = 0
MAX_TOKENS = 40
TEMPERATURE = 0.8
SAMPLED_TOKENS = 2

RECOMPUTED = ("kept", "rough")
PROFILED = ("kept", "sync")
# also at beta 0: what is cut leaves a packed graph spare rows, which it fills, so that it is not the window's
UNCUT = ("kept", "window", "tree", "padded tree")
PROFILED_STEPS = 8


@dataclass(frozen=True)
class Size:
    """How much is asked: greedy prompts, those at a time, samples of one prompt, and how often its LOADS."""

    prompts: int
    concurrency: int
    samples: int
    rounds: int


FULL, DRY = Size(64, MOST, 3_000, 4), Size(4, 2, 30, 1)
# Of servers under load, pass after pass: beta (None: the classifier's), depth, and requests at a time. By turns a graph
# has whole chains, chains that are cut, and a row of each request; of `slots` it is the same graph.
LOADS: dict[str, tuple[tuple[float | None, int, int], ...]] = {
    "kept": ((None, STEPS, MOST), (0.0, STEPS, MOST), (None, 0, MOST)),
    "slots": ((0.0, STEPS, GRAPHS[1]), (None, 0, GRAPHS[1] * (STEPS + 1))),
}


def ask(server: Any, name: str, size: Size, log: Path, traces: Path | None) -> Found:
    """All passes of one server."""
    prompts = held_out_prompts(size.prompts, seed=SEED)
    uncut = nothing = state = recorded = compared = gap = None
    loaded: tuple[Pass, ...] = ()
    faults: dict[str, str] = {}
    with NativeClient(server.base_url, MAX_TOKENS) as client:
        alone = client.run(prompts, 1, _nothing)
        # before anything else is recorded, so that the requests of two servers are the same ones
        if traces is not None and name != "rough":
            with _apart("traces", faults):
                recorded = _recorded(traces, size.prompts)
        with ThreadPoolExecutor(1) as beside:
            stopped = beside.submit(lambda: [client.stop_midway(each) for each in prompts if name == "rough"])
            together = client.run(prompts, size.concurrency, _nothing)
        if traces is not None and name == "rough":
            with _apart("traces", faults):
                recorded = _recorded(traces, 2 * size.prompts)
        if name in UNCUT:
            beta = client.c2t_state()["beta"]
            client.control(0.0, STEPS)
            uncut = client.run(prompts, 1, _nothing)
            if name == "kept":
                client.control(beta, 0)
                nothing = client.run(prompts, 1, _nothing)
            client.control(beta, STEPS)
        client.max_tokens = SAMPLED_TOKENS
        sampled = client.run([prompts[0]] * size.samples, size.concurrency, _nothing, TEMPERATURE)
        if name != "plain":
            state = client.c2t_state()
        if name in LOADS:
            client.max_tokens = MAX_TOKENS
            with _apart("loaded", faults):
                loaded = _under_load(client, prompts, LOADS[name], size)
    samples = Counter(completion.token_ids for completion in sampled.completions)
    text = log.read_text(encoding="utf-8", errors="replace")
    if recorded is not None and name in RECOMPUTED:
        with _apart("recomputed", faults):
            compared = _recomputed(recorded, prompts, alone)
    if name in PROFILED:
        with _apart("gap_ms", faults):
            gap = _gap(server, prompts[: size.concurrency], log)
    aborted = sum(stopped.result())
    found = (alone, together, samples, text, uncut, nothing, state, recorded)
    return Found(*found, recomputed=compared, aborted=aborted, gap_ms=gap, loaded=loaded, faults=faults)


@contextmanager
def _apart(extra: str, faults: dict[str, str]) -> Iterator[None]:
    """What fails within is the fault of the rungs that look at this: others judge by the rest of what a server did."""
    try:
        yield
    except (LookupError, OSError, RuntimeError, ValueError) as error:
        # a C2TError, which is a ValueError; a file; a tensor of another shape; a trace that lacks a key
        faults[extra] = _named(error)


def _named(error: Exception) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _recomputed(recorded: Traces, prompts: Sequence[Sequence[int]], answered: Pass) -> Comparison:
    texts = [(prompt, one.token_ids) for prompt, one in zip(prompts, answered.completions, strict=True)]
    return compare(recorded, recompute(DRAFT, texts, STEPS, recorded.header["top_m"]))


def _under_load(
    client: NativeClient, prompts: Sequence[Sequence[int]], loads: Sequence[tuple[float | None, int, int]], size: Size
) -> tuple[Pass, ...]:
    own, found = client.c2t_state()["beta"], []
    for beta, depth, at_a_time in size.rounds * tuple(loads):
        client.control(own if beta is None else beta, depth)
        found.append(client.run(prompts, min(at_a_time, size.concurrency), _nothing))
    client.control(own, STEPS)
    return tuple(found)


def _gap(server: Any, prompts: Sequence[Sequence[int]], log: Path) -> float | None:
    folder, cpu = log.with_suffix(".trace"), not torch.cuda.is_available()
    with SglangClient(server.base_url, MAX_TOKENS) as client:
        return gap_ms(profiled(client, prompts, PROFILED_STEPS, folder, cpu))


def _nothing() -> None:
    pass


def _recorded(folder: Path, prompts: int) -> Traces:
    """The drafts of so many requests, once the server has written them."""
    deadline = time.monotonic() + 3 * WRITE_EVERY_S
    while time.monotonic() < deadline:
        if any(folder.glob(f"*{SUFFIX}")):
            traces = load_traces(folder)
            if len(traces.first) >= prompts:
                return traces
        time.sleep(1.0)
    raise C2TError(f"{folder} has no drafts of {prompts} requests after {3 * WRITE_EVERY_S:.0f} s")


@dataclass
class Climb:
    """What the servers have done so far, and why some have not. longest: seconds that one took, at most."""

    out: Path
    size: Size
    environment: Mapping[str, str] | None
    deadline: float
    shared: Sequence[str] = ()
    longest: float = 0.0
    found: dict[str, Found] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def visit(self, name: str) -> None:
        """Start a server, ask it, stop it, if there is time for one as long as the longest so far."""
        began = time.monotonic()
        if began + self.longest > self.deadline:
            self.missing[name] = "out of time"
            return
        try:
            server, log, traces = serve(name, self.out, self.environment, self.shared)
            with server as running:
                self.found[name] = ask(running, name, self.size, log, traces)
        except (C2TError, LookupError) as error:
            # a lookup fails where a server's answer lacks what it should hold
            self.missing[name] = _named(error)
        self.longest = max(self.longest, time.monotonic() - began)


def run(
    out: Path,
    size: Size,
    environment: Mapping[str, str] | None,
    deadline: float,
    numbers: Sequence[str] = NUMBERS,
    at_once: int = 1,
    left_out: Sequence[str] = (),
) -> list[BenchRow]:
    """The servers that the rungs need, so many at a time, those left out aside.

    A rung's row is written as soon as its servers have answered or are known not to: the rest may never come.
    """
    rungs = without(left_out, numbers)
    needed = {server for needs in rungs.values() for server in needs}
    climb = Climb(out, size, environment, deadline, SHARED if at_once > 1 else ())
    kind, record = "measured" if environment is not None else "functional", RunRecord.capture(seed=SEED).to_json()
    setting: dict[str, str | int | float | None] = {
        "dtype": "float32",
        "steps": STEPS,
        "output_tokens": MAX_TOKENS,
        "servers_at_once": at_once,
    }
    if left_out:
        setting["without"] = ", ".join(left_out)
    rows: list[BenchRow] = []
    one_at_a_time = Lock()

    def visit(name: str) -> None:
        climb.visit(name)
        with one_at_a_time:
            state = climb.found[name].state if name in climb.found else None
            if state is not None:
                checked = self_checks.rows_of(state, name, kind, setting, record)
                append_rows(out / self_checks.ROWS, checked)
                for row in checked:
                    show(row)
            known = {*climb.found, *climb.missing}
            for rung in [rung for rung, needs in rungs.items() if known.issuperset(needs)]:
                metrics, fault = judge(rung, rungs.pop(rung), climb.found, climb.missing)
                row = BenchRow("gpu-ladder", kind, rung, setting, metrics, fault, record)
                append_rows(out / ROWS, [row])
                show(row)
                rows.append(row)

    with ThreadPoolExecutor(at_once) as pool:
        for done in as_completed([pool.submit(visit, name) for name in SERVERS if name in needed]):
            done.result()
    return rows


def judge(rung: str, needs: Sequence[str], found: Mapping[str, Found], missing: Mapping[str, str]) -> Verdict:
    """What a rung's check says of its servers."""
    lacking = {name: missing[name] for name in needs if name in missing}
    if lacking:
        return {}, f"not tried: {lacking}"
    try:
        metrics, fault = RUNGS[rung][0]({name: found[name] for name in needs})
        # a row has figures or a fault
        return ({}, f"{fault}; found {metrics}") if fault else (metrics, "")
    except (ArithmeticError, LookupError, RuntimeError, TypeError) as error:
        # a server that counts no steps, traces of no states, a state without a planner: a fault of this rung alone
        return {}, _named(error)


def show(row: BenchRow) -> None:
    """Print a row."""
    shown = " ".join(f"{name}={value:.4g}" for name, value in row.metrics.items() if value is not None)
    print(f"{row.arm:<20}{'FAULT' if row.error else 'holds':<7}{shown} {row.error}".rstrip(), flush=True)


def main(argv: Sequence[str]) -> int:
    """Serve, check, print."""
    parser = part_parser("benchmarks.gpu.ladder", __doc__, "few requests, on the CPU engine")
    parser.add_argument("--rungs", nargs="+", choices=NUMBERS, default=NUMBERS, metavar="R", help=f"of {NUMBERS}")
    parser.add_argument("--at-once", type=int, default=1, help="servers beside each other")
    parser.add_argument(
        "--without", nargs="+", choices=list(SERVERS)[1:], default=[], metavar="SERVER", help="left out"
    )
    options = parser.parse_args(argv)
    deadline = float("inf") if options.dry_run else time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        environment = None if options.dry_run else plugin_environment(Path(scratch), float32=True)
        size, several = DRY if options.dry_run else FULL, (options.at_once, options.without)
        rows = run(options.out, size, environment, deadline, options.rungs, *several)
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
