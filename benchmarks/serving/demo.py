"""`make demo`: a stock engine serves a real model on this CPU, plain, with static chains and with C2T as it comes.

    python -m benchmarks.serving.demo                  SGLang, on its CPU engine
    python -m benchmarks.serving.demo --engine vllm    vLLM, on its CPU backend
    python -m benchmarks.serving.demo --pair toy       the tests' small pair: a quick check that says nothing of speed

Servers take turns, so that all arms are measured side by side. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.pairs.smollm2.commands import write_pair
from benchmarks.report.pictures import draw_speeds
from benchmarks.report.rows import append_rows
from benchmarks.serving import toy_demo
from benchmarks.serving.demo_page import STREAMED, table, tie_lines
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.host import add_threads, measure_host, threads_of
from benchmarks.serving.interleaved import Interleaved
from benchmarks.serving.real_command import drawing_client
from benchmarks.serving.real_demo import AS_IT_COMES, LOADS, PLAIN, RealDemo
from benchmarks.serving.real_pair import WORK, chat_prompts, use_threads
from benchmarks.serving.streamed import question, show
from c2t_plugin.errors import C2TError

PIPE_WIDTH = 150
PAIRS = ("smollm2", "toy")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pair", choices=PAIRS, default=PAIRS[0], help="toy: see --pair toy --help")
    parser.add_argument("--engine", choices=ENGINES, default="sglang", help="which one serves (default: sglang)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of an answer, in the mean")
    parser.add_argument("--passes", type=int, default=5, help="rounds of all arms, if there is time")
    parser.add_argument("--least", type=int, default=2, help="rounds of all arms in any case")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no round begins that would end later")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(LOADS), help="requests at once")
    add_threads(parser)
    parser.add_argument("--work", type=Path, default=WORK, help="directory of the pair, prepared if it is not there")
    parser.add_argument("--out", type=Path, help="directory of rows, picture and server logs (default: build/demo)")
    return parser


def main(argv: list[str]) -> int:
    """Serve, measure, print; status 1 if an answer differed by more than a tie or an arm did not run."""
    pair = argparse.ArgumentParser(add_help=False)
    pair.add_argument("--pair", choices=PAIRS, default=PAIRS[0])
    chosen, rest = pair.parse_known_args(argv)
    if chosen.pair == "toy":
        return toy_demo.main(rest)
    options = _parser().parse_args(argv)
    options.out = options.out or Path("build/demo" if options.engine == "sglang" else f"build/demo-{options.engine}")
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    # a pipe has no width of its own, and 80 columns break words
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    try:
        return _run(options, console)
    except C2TError as error:
        logs = options.out / "logs"
        console.print(f"demo: {error}\nThe servers' logs are in {logs}.", style="red", markup=False)
        return 2


def _run(options: argparse.Namespace, console: Console) -> int:
    threads = threads_of(options)
    use_threads(threads)
    console.print("Preparing the model and measuring this processor.")
    pair = write_pair(options.work)
    host = measure_host(pair / "target", threads)
    engine = ENGINES[options.engine]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

    with Interleaved(drawing_client(engine, options.tokens)) as contest:
        with Progress(*columns, console=console) as progress:
            demo = RealDemo(
                engine, pair, options.out, chat_prompts(pair / "target", "development"), contest, progress, host
            )
            demo.start(options.concurrency, options.passes)
            demo.measure(options.concurrency, options.passes, options.least, options.minutes)
        with contest.turn(PLAIN) as client:
            ties, wrong = tie_lines(demo.found, demo.asked, client)
        rows = demo.rows(options.tokens)
        console.print(table(rows, demo.found, engine.name, host))
        for line in [*demo.refused, *ties, *wrong]:
            console.print(line, style="red" if line in wrong else None, markup=False)
        path, picture = options.out / "rows.jsonl", options.out / "speeds.png"
        path.unlink(missing_ok=True)
        append_rows(path, rows)
        draw_speeds(rows, picture)
        console.print(f"rows: {path}; picture: {picture}")
        if AS_IT_COMES in contest.names:
            console.print(STREAMED, markup=False)
            with contest.turn(AS_IT_COMES) as client:
                show(client.pieces(question(pair / "target")), pair / "target", console)
    return 1 if wrong or demo.missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
