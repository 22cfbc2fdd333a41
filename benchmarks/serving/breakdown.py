"""Where a decoding step's time goes: draft, statistics, classifier, second top-K or rerank, verify, other.

    python -m benchmarks.serving.breakdown --arms C2T "static 4" "C2T tree" "EAGLE-2 tree" --concurrency 1 8 --cpu

The engine's own torch profiler writes a trace with Python's call stack; `spans` adds it up. What C2T v2 equation 12 and
v1 figures 5 and 11 call t_math1 is `statistics`, t_cls `classifier`, t_math2 `rerank`; in trees the last holds the
making of links and mask too. With device times in the trace those count; kernels of one captured graph are then told
apart by their names, as far as they are C2T's own: --server-args "--disable-cuda-graph" gives the phases. A server is
started for each number of requests: SGLang reads from its environment how many must run before it profiles.

The profiler slows everything down, the host most: shares mean more than milliseconds, and on a CPU neither says
anything about a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.pairs.toy import held_out_prompts
from benchmarks.report.rows import BenchRow, append_rows
from benchmarks.report.tables import listing
from benchmarks.serving.arms import Arm, Speculation, chosen
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.engines.sglang import SglangClient
from benchmarks.serving.measuring import one_line
from benchmarks.serving.options import add_arm_options, dtype_of, kind_of, models, runner, speculation
from benchmarks.serving.server import Runner, Server
from benchmarks.serving.spans import Event, load_trace, phases
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

SCENARIO = "breakdown"
MAX_TOKENS = 64
# How many requests must decode together before SGLang starts to write a trace of decoding.
AT_LEAST = "SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS"
NO_GRAPHS = ("--disable-cuda-graph", "--disable-decode-cuda-graph", "--cuda-graph-backend-decode disabled")
PIPE_WIDTH = 180


def profiled(client: SglangClient, prompts: Sequence[Sequence[int]], steps: int, out: Path, cpu: bool) -> list[Event]:
    """A trace of `steps` decoding steps while the prompts are being answered: the first ones, or those from the moment
    on at which as many are as the server's environment says.

    C2TError if there was no such moment, or too late.
    """
    shutil.rmtree(out, ignore_errors=True)
    # asked for before there is anything to do, so that no step is missed
    client.profile(out, steps, ["CPU"] if cpu else ["CPU", "GPU"])
    client.run(prompts, len(prompts), lambda: None)
    traces = sorted(out.rglob("*DECODE*.trace.json.gz"))
    if not traces:
        raise C2TError(
            f"{len(prompts)} requests were answered before {steps} steps of them all were traced; ask for fewer --steps"
        )
    return load_trace(traces[0])


def by_phase(server: Server, concurrency: int, options: argparse.Namespace) -> dict[str, float]:
    """What `spans.phases` finds in a trace of a server, which is started for it. C2TError if it cannot be had."""
    prompts = held_out_prompts(concurrency)
    with server, SglangClient(server.base_url, MAX_TOKENS) as client:
        client.run(prompts[:1], 1, lambda: None)
        found = phases(profiled(client, prompts, options.steps, options.out / "trace", options.cpu))
    if found["steps"] != options.steps:
        raise C2TError(f"the trace holds {found['steps']:g} decoding steps, not {options.steps}; ask for fewer --steps")
    return found


def graphs_of(flags: Sequence[str], cpu: bool) -> str:
    """Whether a server with these flags decodes in CUDA graphs: on or off."""
    written = " ".join(flags).replace("=", " ") + " "
    return "off" if cpu or any(f"{flag} " in written for flag in NO_GRAPHS) else "on"


def measure(
    options: argparse.Namespace, starts: Runner, arm: Arm, on: Speculation, run: Mapping[str, Any]
) -> list[BenchRow]:
    """One row per concurrency of one arm; what fails leaves its reason in place of figures."""
    kind = kind_of(run, options.cpu)
    setting = {
        "engine": starts.engine.name,
        "target": starts.target.name,
        "dtype": dtype_of(options),
        "base": options.base,
        "d_max": options.d_max,
        "cuda_graphs": graphs_of(starts.flags, options.cpu),
    }
    rows = []
    for concurrency in options.concurrency:
        found: dict[str, float] = {}
        reason = ""
        environment = {**os.environ, AT_LEAST: str(concurrency)}
        try:
            alone = replace(starts, environment=environment)
            found = by_phase(alone.server(f"{SCENARIO}-{arm.name}-{concurrency}", arm, on), concurrency, options)
        except C2TError as error:
            reason = one_line(error)
        rows.append(BenchRow(SCENARIO, kind, arm.name, {**setting, "concurrency": concurrency}, found, reason, run))
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.breakdown",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--arms", nargs="+", default=("C2T", "static 4"), metavar="ARM")
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--steps", type=int, default=8, help="decoding steps to profile")
    add_arm_options(parser, Path("build/breakdown"))
    return parser


def main(argv: list[str]) -> int:
    """Profile the arms, print a table, append rows; status 1 if an arm failed, 2 if the command is wrong."""
    options = _parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    run = RunRecord.capture(seed=0).to_json()
    try:
        arms = chosen("sglang", tuple(options.arms))
        found = models(options, ENGINES["sglang"])
        on, starts = speculation(options, found), runner(options, ENGINES["sglang"], found.target)
    except C2TError as error:
        print(f"breakdown: {error}", file=sys.stderr)
        return 2
    rows = [row for arm in arms for row in measure(options, starts, arm, on, run)]
    append_rows(options.out / "rows.jsonl", rows)
    console.print(Markdown(listing(rows)))
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
