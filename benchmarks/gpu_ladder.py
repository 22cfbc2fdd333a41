"""What has to hold in SGLang on a GPU before its speed means anything, one rung after the other, with the shipped pair.

    python -m benchmarks.gpu_ladder --out OUT --seconds 500      on a GPU, float32
    python -m benchmarks.gpu_ladder --out OUT --rungs R9 R14     these alone, with the servers that they need
    python -m benchmarks.gpu_ladder --out OUT --dry-run          few requests, on the CPU engine: it works

starts nine servers one after the other (plain decoding; C2T with kept tokens only; over the uniform window; without
CUDA graphs; with beta auto; among aborted, retracted and chunked requests; without the overlap scheduler; trees of kept
nodes only; padded trees), asks them the same, and writes a row per rung (gpu_rungs.py) to OUT/ladder.jsonl with what
was found and, if a rung does not hold, why. Exit status 1: a rung does not hold, or could not be tried. Numbers of
rungs stay when others are added; what the ladder leaves to other scripts or to more GPUs is in docs/benchmarking.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.breakdown import profiled
from benchmarks.gpu_rungs import NUMBERS, RUNGS, STEPS, TOPK, Found, number_of
from benchmarks.gpu_server import GpuServer, part_parser, plugin_environment
from benchmarks.native_client import NativeClient
from benchmarks.recomputed import Comparison, compare, recompute
from benchmarks.record import BenchRow, append_rows
from benchmarks.serving import Client, Pass
from benchmarks.spans import gap_ms
from c2t_plugin.engines.sglang.cpu_engine.server import CpuServer
from c2t_plugin.errors import C2TError
from c2t_plugin.pair import held_out_prompts, pair_dir
from c2t_plugin.provenance import RunRecord
from c2t_plugin.recording import WRITE_EVERY_S
from c2t_plugin.traces import SUFFIX, Traces, load_traces

ROWS = "ladder.jsonl"
SEED = 0
DRAFT = "eagle3"
MAX_TOKENS = 40
START_TIMEOUT_S = 240.0
TEMPERATURE = 0.8
SAMPLED_TOKENS = 2

C2T = ("--speculative-algorithm", "C2T", "--speculative-num-steps", str(STEPS))
TREE = (*C2T, "--speculative-c2t-mode", "tree", "--speculative-eagle-topk", str(TOPK))
# name: options beside those of the draft
SERVERS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "kept": C2T,
    "window": (*C2T, "--speculative-c2t-ragged", "off"),
    "eager": (*C2T, "--disable-cuda-graph"),
    "auto": (*C2T, "--speculative-c2t-beta", "auto"),
    "rough": (*C2T, "--chunked-prefill-size", "32", "--enable-mixed-chunk"),
    "sync": (*C2T, "--disable-overlap-schedule"),
    "tree": TREE,
    "padded tree": (*TREE, "--speculative-c2t-ragged", "off"),
}
RECORDED = ("kept", "eager", "rough")
RECOMPUTED = ("kept", "rough")
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
# Else SGLang's Triton attention multiplies float32 in TF32, of 10 bits, and words that are nearly level change places.
PRECISE = {"TRITON_F32_DEFAULT": "ieee"}
PROFILED = ("kept", "sync")
PROFILED_STEPS = 8


@dataclass(frozen=True)
class Size:
    """How much is asked: greedy prompts, those at a time, and samples of one prompt."""

    prompts: int
    concurrency: int
    samples: int


FULL, DRY = Size(64, 32, 20_000), Size(4, 2, 30)


def ask(server: Any, name: str, size: Size, log: Path, traces: Path | None) -> Found:
    """All passes of one server."""
    prompts = held_out_prompts(size.prompts, seed=SEED)
    uncut = nothing = state = recorded = None
    with NativeClient(server.base_url, MAX_TOKENS) as client:
        alone = client.run(prompts, 1, _nothing)
        # before anything else is recorded, so that the requests of two servers are the same ones
        if traces is not None and name != "rough":
            recorded = _recorded(traces, size.prompts)
        with ThreadPoolExecutor(1) as beside:
            stopped = beside.submit(lambda: [client.stop_midway(each) for each in prompts if name == "rough"])
            together = client.run(prompts, size.concurrency, _nothing)
        if traces is not None and name == "rough":
            recorded = _recorded(traces, 2 * size.prompts)
        if name in ("kept", "tree"):
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
    samples = Counter(completion.token_ids for completion in sampled.completions)
    text = log.read_text(encoding="utf-8", errors="replace")
    return Found(
        *(alone, together, samples, text, uncut, nothing, state, recorded),
        recomputed=_recomputed(recorded, prompts, alone) if recorded is not None and name in RECOMPUTED else None,
        aborted=sum(stopped.result()),
        gap_ms=_gap(server, prompts[: size.concurrency], log) if name in PROFILED else None,
    )


def _recomputed(recorded: Traces, prompts: Sequence[Sequence[int]], answered: Pass) -> Comparison:
    texts = [(prompt, one.token_ids) for prompt, one in zip(prompts, answered.completions, strict=True)]
    return compare(recorded, recompute(DRAFT, texts, STEPS, recorded.header["top_m"]))


def _gap(server: Any, prompts: Sequence[Sequence[int]], log: Path) -> float | None:
    folder, cpu = log.with_suffix(".trace"), not torch.cuda.is_available()
    with Client(server.base_url, MAX_TOKENS) as client:
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


def serve(
    name: str, out: Path, environment: Mapping[str, str] | None
) -> tuple[AbstractContextManager[Any], Path, Path | None]:
    """A server, its log, and where it records; environment: None for the CPU engine."""
    log, traces = out / f"ladder-{name}.log", out / f"traces-{name}" if name in RECORDED else None
    flags = list(SERVERS[name])
    if flags:
        flags += ["--speculative-draft-model-path", str(pair_dir() / DRAFT)]
    if traces is not None:
        flags += ["--speculative-c2t-trace-dir", str(traces), "--speculative-c2t-trace-share", "1.0"]
    target = pair_dir() / "target"
    added = RETRACT if name == "rough" else {}
    if environment is None:
        flags += ["--skip-server-warmup"]
        env = {**os.environ, **added}
        return CpuServer(target, *flags, log=log, start_timeout=START_TIMEOUT_S, env=env), log, traces
    environment = {**environment, **added, **PRECISE}
    flags += ["--dtype", "float32", "--max-running-requests", str(FULL.concurrency)]
    started = GpuServer(target, *flags, log=log, environment=environment, start_timeout=START_TIMEOUT_S)
    return started, log, traces


def run(
    out: Path, size: Size, environment: Mapping[str, str] | None, deadline: float, numbers: Sequence[str] = NUMBERS
) -> list[BenchRow]:
    """The servers that the rungs need, then the rungs."""
    found: dict[str, Found] = {}
    missing: dict[str, str] = {}
    rungs = {name: rung for name, rung in RUNGS.items() if number_of(name) in numbers}
    needed = {server for _, needs in rungs.values() for server in needs}
    for name in filter(needed.__contains__, SERVERS):
        if time.monotonic() > deadline:
            missing[name] = "out of time"
            continue
        try:
            server, log, traces = serve(name, out, environment)
            with server as running:
                found[name] = ask(running, name, size, log, traces)
        except (C2TError, LookupError) as error:
            # a lookup fails where a server's answer lacks what it should hold
            missing[name] = " ".join(f"{type(error).__name__}: {error}".split())
    kind, record = "measured" if environment is not None else "functional", RunRecord.capture(seed=SEED).to_json()
    setting: dict[str, str | int | float | None] = {
        "dtype": "float32",
        "steps": STEPS,
        "output_tokens": MAX_TOKENS,
    }
    rows = []
    for rung, (check, needs) in rungs.items():
        lacking = {name: missing[name] for name in needs if name in missing}
        asked = {name: found[name] for name in needs if name in found}
        metrics, fault = ({}, f"not tried: {lacking}") if lacking else check(asked)
        rows.append(BenchRow("gpu-ladder", kind, rung, setting, metrics, fault, record))
    append_rows(out / ROWS, rows)
    return rows


def main(argv: Sequence[str]) -> int:
    """Serve, check, print."""
    parser = part_parser("benchmarks.gpu_ladder", __doc__, "few requests, on the CPU engine")
    parser.add_argument("--rungs", nargs="+", choices=NUMBERS, default=NUMBERS, metavar="R", help=f"of {NUMBERS}")
    options = parser.parse_args(argv)
    deadline = float("inf") if options.dry_run else time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        environment = None if options.dry_run else plugin_environment(Path(scratch))
        rows = run(options.out, DRY if options.dry_run else FULL, environment, deadline, options.rungs)
    for row in rows:
        shown = " ".join(f"{name}={value:.4g}" for name, value in row.metrics.items() if value is not None)
        print(f"{row.arm:<20}{'FAULT' if row.error else 'holds':<7}{shown} {row.error}".rstrip())
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
