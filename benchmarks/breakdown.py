"""Where a decoding step's time goes: draft, statistics, classifier, second top-K or rerank, verify, other.

    python -m benchmarks.breakdown --arms C2T "static 4" "C2T tree" "EAGLE-2 tree" --concurrency 1 8 --cpu

The engine's own torch profiler writes a trace with Python's call stack; `spans` adds it up. What C2T v2 equation 12 and
v1 figures 5 and 11 call t_math1 is `statistics`, t_cls `classifier`, t_math2 `rerank`; in trees the last holds the
making of links and mask too. With device times in the trace those count; kernels of one captured graph are then told
apart by their names, as far as they are C2T's own.

The profiler slows everything down, the host most: shares mean more than milliseconds, and on a CPU neither says
anything about a GPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.arm_options import add_arm_options, arm_values, dtype_of, kind_of
from benchmarks.arms import chosen
from benchmarks.measuring import one_line
from benchmarks.record import BenchRow, append_rows
from benchmarks.server import Server
from benchmarks.serving import Client, Pass
from benchmarks.spans import Event, load_trace, phases
from benchmarks.tables import listing
from c2t_plugin.errors import C2TError
from c2t_plugin.pair import held_out_prompts, pair_dir
from c2t_plugin.provenance import RunRecord

SCENARIO = "breakdown"
MAX_TOKENS = 64
PIPE_WIDTH = 180


def profiled(client: Client, prompts: Sequence[Sequence[int]], steps: int, out: Path, cpu: bool) -> list[Event]:
    """A trace of `steps` decoding steps while all prompts are being answered.

    C2TError if the server never had all of them at once.
    """
    shutil.rmtree(out, ignore_errors=True)
    failed: list[C2TError] = []
    answered: list[Pass] = []

    def answer() -> None:
        try:
            answered.append(client.run(prompts, len(prompts), lambda: None))
        except C2TError as error:
            failed.append(error)

    load = threading.Thread(target=answer)
    load.start()
    try:
        # by stage, so that prefill does not count as a decoding step
        client.profile(out, steps, ["CPU"] if cpu else ["CPU", "GPU"])
    finally:
        load.join()
    if failed:
        raise failed[0]
    if answered[0].most_at_once < len(prompts):
        raise C2TError(f"only {answered[0].most_at_once} of {len(prompts)} requests ever ran at once")
    traces = sorted(out.rglob("*DECODE*.trace.json.gz"))
    if not traces:
        raise C2TError("the server wrote no trace of decoding; take longer answers or fewer steps")
    return load_trace(traces[0])


def measure(options: argparse.Namespace, arm: str, flags: Sequence[str], run: Mapping[str, Any]) -> list[BenchRow]:
    """One row per concurrency of one arm; a server that does not start leaves its reason in each."""
    target = options.target or pair_dir() / "target"
    kind = kind_of(run, options.cpu)
    setting = {
        "engine": "sglang",
        "target": target.name,
        "dtype": dtype_of(options),
        "base": options.base,
        "d_max": options.d_max,
    }
    found: dict[int, dict[str, float] | str] = {}
    try:
        log = options.out / f"{SCENARIO}-{arm}.log".replace(" ", "-")
        server = Server(target, flags, log, options.cpu, options.start_timeout)
        with server, Client(server.base_url, MAX_TOKENS) as client:
            for concurrency in options.concurrency:
                prompts = held_out_prompts(concurrency)
                client.run(prompts[:1], 1, lambda: None)
                events = profiled(client, prompts, options.steps, options.out / "trace", options.cpu)
                found[concurrency] = phases(events)
    except C2TError as error:
        missing = [concurrency for concurrency in options.concurrency if concurrency not in found]
        found |= dict.fromkeys(missing, one_line(error))
    return [
        BenchRow(SCENARIO, kind, arm, {**setting, "concurrency": concurrency}, {}, result, run)
        if isinstance(result, str)
        else BenchRow(SCENARIO, kind, arm, {**setting, "concurrency": concurrency}, result, "", run)
        for concurrency, result in found.items()
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.breakdown", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
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
        values = arm_values(options, "sglang")
    except C2TError as error:
        print(f"breakdown: {error}", file=sys.stderr)
        return 2
    rows = []
    for arm in arms:
        flags = [*options.server_args.split(), *arm.command({**values, "width": options.d_max + 1})]
        rows += measure(options, arm.name, flags, run)
    append_rows(options.out / "rows.jsonl", rows)
    console.print(Markdown(listing(rows)))
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
