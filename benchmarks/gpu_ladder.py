"""What has to hold in SGLang on a GPU before its speed means anything, one rung after the other, with the shipped pair.

    python -m benchmarks.gpu_ladder --out OUT --seconds 500      on a GPU, float32
    python -m benchmarks.gpu_ladder --out OUT --dry-run          few requests, on the CPU engine: it works

starts five servers one after the other (plain decoding; C2T with kept tokens only; over the uniform window; without
CUDA graphs; with beta auto), asks them the same, and writes a row per rung to OUT/ladder.jsonl with what was found and,
if a rung does not hold, why. Exit status 1: a rung does not hold, or could not be tried. Numbers of rungs stay when
others are added; what needs another tool or more GPUs is in docs/benchmarking.md.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_server import GpuServer, part_parser, plugin_environment
from benchmarks.gpu_serving import NativeClient
from benchmarks.record import BenchRow, append_rows
from benchmarks.serving import Pass
from c2t_plugin.engines.sglang.cpu_engine.server import CpuServer
from c2t_plugin.errors import C2TError
from c2t_plugin.pair import held_out_prompts, pair_dir
from c2t_plugin.provenance import RunRecord
from c2t_plugin.recording import WRITE_EVERY_S
from c2t_plugin.traces import SUFFIX, Traces, load_traces

ROWS = "ladder.jsonl"
SEED = 0
STEPS = 4
MAX_TOKENS = 40
START_TIMEOUT_S = 240.0
TEMPERATURE = 0.8
SAMPLED_TOKENS = 2
# Below this probability of being so far off by chance a distribution is another one.
ALPHA = 1e-4
# Outcomes that are rarer are counted together.
MIN_EXPECTED = 5.0
# float32 sums over a vocabulary in another order
STATISTICS = 2e-3

C2T = ("--speculative-algorithm", "C2T", "--speculative-num-steps", str(STEPS))
# name: options beside those of the draft
SERVERS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "kept": C2T,
    "window": (*C2T, "--speculative-c2t-ragged", "off"),
    "eager": (*C2T, "--disable-cuda-graph"),
    "auto": (*C2T, "--speculative-c2t-beta", "auto"),
}
RECORDED = ("kept", "eager")


@dataclass(frozen=True)
class Size:
    """How much is asked: greedy prompts, those at a time, and samples of one prompt."""

    prompts: int
    concurrency: int
    samples: int


FULL, DRY = Size(64, 32, 20_000), Size(4, 2, 30)


@dataclass(frozen=True)
class Found:
    """What one server did. uncut, nothing: passes at beta 0 and with nothing verified. samples: of the first tokens."""

    alone: Pass
    together: Pass
    samples: Counter[tuple[int, ...]]
    log: str
    uncut: Pass | None = None
    nothing: Pass | None = None
    state: Mapping[str, Any] | None = None
    traces: Traces | None = None


def ask(server: Any, name: str, size: Size, log: Path, traces: Path | None) -> Found:
    """All passes of one server."""
    prompts = held_out_prompts(size.prompts, seed=SEED)
    with NativeClient(server.base_url, MAX_TOKENS) as client:
        alone = client.run(prompts, 1, _nothing)
        # before anything else is recorded, so that the requests of two servers are the same ones
        recorded = None if traces is None else _recorded(traces, size.prompts)
        together = client.run(prompts, size.concurrency, _nothing)
        uncut = nothing = state = None
        if name == "kept":
            beta = client.c2t_state()["beta"]
            client.control(0.0, STEPS)
            uncut = client.run(prompts, 1, _nothing)
            client.control(beta, 0)
            nothing = client.run(prompts, 1, _nothing)
            client.control(beta, STEPS)
        client.max_tokens = SAMPLED_TOKENS
        sampled = client.run([prompts[0]] * size.samples, size.concurrency, _nothing, TEMPERATURE)
        if name != "plain":
            state = client.c2t_state()
    samples = Counter(completion.token_ids for completion in sampled.completions)
    text = log.read_text(encoding="utf-8", errors="replace")
    return Found(alone, together, samples, text, uncut, nothing, state, recorded)


def _nothing() -> None:
    pass


def _recorded(folder: Path, prompts: int) -> Traces:
    """The drafts of so many requests, once the server has written them."""
    deadline = time.monotonic() + 3 * WRITE_EVERY_S
    while time.monotonic() < deadline:
        if any(folder.glob(f"*{SUFFIX}")):
            traces = load_traces(folder)
            if len(traces.first) == prompts:
                return traces
        time.sleep(1.0)
    raise C2TError(f"{folder} has no drafts of {prompts} requests after {3 * WRITE_EVERY_S:.0f} s")


# --- rungs: what was found, and why it does not hold


Verdict = tuple[dict[str, float | None], str]


def configured(found: Mapping[str, Found]) -> Verdict:
    """One rank, one plugin: each server states its configuration once, plain decoding never."""
    lines = {name: each.log.count("C2T: configuration {") for name, each in found.items()}
    wrong = [name for name, count in lines.items() if count != int(name != "plain")]
    return {"servers": len(lines)}, f"configuration stated {lines} times" if wrong else ""


def graphs_are_eager(found: Mapping[str, Found]) -> Verdict:
    """Statistics out of the draft's CUDA graph are those of the same draft without one."""
    graph, eager = found["kept"].traces, found["eager"].traces
    assert graph is not None and eager is not None
    if not (torch.equal(graph.prompt, eager.prompt) and torch.equal(graph.step, eager.step)):
        return {}, f"the servers visited {len(graph)} and {len(eager)} states, which are not the same ones"
    names = ("joint_log_prob", "log_prob", "entropy", "margin")
    off = max(float((getattr(graph.chain, n) - getattr(eager.chain, n)).abs().max()) for n in names)
    return {"states": len(graph), "largest_difference": off}, "" if off < STATISTICS else f"they differ by {off:.3g}"


def kept_is_window(found: Mapping[str, Found]) -> Verdict:
    """Rows that are not computed change nothing: as many steps, verified and accepted tokens as over the window."""
    pairs = [(found["kept"].alone, found["window"].alone), (found["kept"].together, found["window"].together)]
    same = all(
        [(one.verify_steps, one.accepted, one.candidates) for one in mine.completions]
        == [(one.verify_steps, one.accepted, one.candidates) for one in theirs.completions]
        for mine, theirs in pairs
    )
    taus = {"tau_kept": pairs[0][0].tau, "tau_window": pairs[0][1].tau}
    return taus, "" if same else "requests were verified in other steps, or accepted otherwise"


def greedy(found: Mapping[str, Found]) -> Verdict:
    """Every server's text is plain decoding's, one request at a time and many."""
    plain = found["plain"].alone
    passes = {name: (each.alone, each.together) for name, each in found.items()}
    least = {name: min(each.n_identical(plain) for each in both) for name, both in passes.items()}
    of = len(plain.completions)
    wrong = {name: count for name, count in least.items() if count != of}
    return {"identical": min(least.values()), "prompts": of}, f"of {of} outputs the same: {wrong}" if wrong else ""


def sampled(found: Mapping[str, Found]) -> Verdict:
    """Samples of every server have plain decoding's distribution."""
    chances = {name: p_value(found["plain"].samples, each.samples) for name, each in found.items() if name != "plain"}
    least = min(chances.values())
    return {"samples": found["plain"].samples.total(), "least_p": least}, "" if least > ALPHA else f"chances {chances}"


def ends(found: Mapping[str, Found]) -> Verdict:
    """Beta 0 verifies whole chains, and with nothing verified each step has one token."""
    uncut, nothing = found["kept"].uncut, found["kept"].nothing
    assert uncut is not None and nothing is not None
    chains = sum(one.candidates for one in uncut.completions) / uncut.verify_steps
    steps = nothing.output_tokens - len(nothing.completions)
    wrong = chains != STEPS or nothing.verify_steps != steps
    metrics: dict[str, float | None] = {"gamma_uncut": chains, "steps": nothing.verify_steps, "tokens": steps}
    return metrics, "these are not the two ends" if wrong else ""


def planned(found: Mapping[str, Found]) -> Verdict:
    """Beta auto has a curve to decide by, and has decided."""
    state = found["auto"].state
    assert state is not None
    planner: Any = state["planner"]
    decided = planner["active"] and planner["curve"]
    depths = {f"steps_at_depth_{depth}": count for depth, count in state["depths"].items()}
    return depths, "" if decided else f"the planner is {planner}"


# name: check, and the servers it looks at
RUNGS: dict[str, tuple[Callable[[Mapping[str, Found]], Verdict], tuple[str, ...]]] = {
    "R1 configuration": (configured, tuple(SERVERS)),
    "R6 graph and eager": (graphs_are_eager, ("kept", "eager")),
    "R8 kept and window": (kept_is_window, ("kept", "window")),
    "R9 greedy": (greedy, tuple(SERVERS)),
    "R9 sampled": (sampled, tuple(SERVERS)),
    "R12 planner": (planned, ("auto",)),
    "R16 both ends": (ends, ("kept",)),
}


def p_value(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> float:
    """Chance that two samples of one distribution differ so much (chi-square, rare outcomes together).

    By torch alone, since a bare machine has no scipy.
    """
    smaller, both = min(first.total(), second.total()), first + second
    common = [key for key, count in both.items() if smaller * count / both.total() >= MIN_EXPECTED]
    table = torch.tensor([[float(counts[key]) for key in common] for counts in (first, second)]).view(2, -1)
    totals = torch.tensor([[float(first.total())], [float(second.total())]])
    table = torch.cat([table, totals - table.sum(1, keepdim=True)], dim=1)
    table = table[:, table.sum(0) > 0].double()
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    freedom = table.shape[1] - 1
    if not freedom:
        return 1.0
    statistic = ((table - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))


def serve(
    name: str, out: Path, environment: Mapping[str, str] | None
) -> tuple[AbstractContextManager[Any], Path, Path | None]:
    """A server, its log, and where it records; environment: None for the CPU engine."""
    log, traces = out / f"ladder-{name}.log", out / f"traces-{name}" if name in RECORDED else None
    flags = list(SERVERS[name])
    if flags:
        flags += ["--speculative-draft-model-path", str(pair_dir() / "eagle3")]
    if traces is not None:
        flags += ["--speculative-c2t-trace-dir", str(traces), "--speculative-c2t-trace-share", "1.0"]
    target = pair_dir() / "target"
    if environment is None:
        flags += ["--skip-server-warmup"]
        return CpuServer(target, *flags, log=log, start_timeout=START_TIMEOUT_S), log, traces
    flags += ["--dtype", "float32", "--max-running-requests", str(FULL.concurrency)]
    started = GpuServer(target, *flags, log=log, environment=environment, start_timeout=START_TIMEOUT_S)
    return started, log, traces


def run(out: Path, size: Size, environment: Mapping[str, str] | None, deadline: float) -> list[BenchRow]:
    """All servers, then all rungs."""
    found: dict[str, Found] = {}
    missing: dict[str, str] = {}
    for name in SERVERS:
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
    rows = []
    for rung, (check, needs) in RUNGS.items():
        lacking = {name: missing[name] for name in needs if name in missing}
        metrics, fault = ({}, f"not tried: {lacking}") if lacking else check(found)
        setting: dict[str, str | int | float | None] = {"steps": STEPS, "output_tokens": MAX_TOKENS}
        setting["dtype"] = "float32"
        rows.append(BenchRow("gpu-ladder", kind, rung, setting, metrics, fault, record))
    append_rows(out / ROWS, rows)
    return rows


def main(argv: Sequence[str]) -> int:
    """Serve, check, print."""
    options = part_parser("benchmarks.gpu_ladder", __doc__, "few requests, on the CPU engine").parse_args(argv)
    deadline = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        environment = None if options.dry_run else plugin_environment(Path(scratch))
        rows = run(options.out, DRY if options.dry_run else FULL, environment, deadline)
    for row in rows:
        shown = " ".join(f"{name}={value:.4g}" for name, value in row.metrics.items() if value is not None)
        print(f"{row.arm:<20}{'FAULT' if row.error else 'holds':<7}{shown} {row.error}".rstrip())
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
