"""What commands share that measure the real pair's arms by turns: options, what every row says, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.report.rows import BenchRow, append_rows
from benchmarks.report.tables import listing
from benchmarks.serving.arms import Arm, Speculation
from benchmarks.serving.client import Client
from benchmarks.serving.engines import ENGINES, Engine
from benchmarks.serving.host import Host, add_threads
from benchmarks.serving.measuring import one_line
from benchmarks.serving.real_pair import BASE, WORK, ChatPrompts
from benchmarks.serving.scenarios import lengths_of
from benchmarks.serving.server import Runner, Server
from c2t_plugin.errors import C2TError

PIPE_WIDTH = 200


def real_parser(prog: str, doc: str | None, arms: str, out: str) -> argparse.ArgumentParser:
    """With the options that all have. arms: help of --arms. out: the default of --out, before the engine's name."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.serving.{prog}", description=doc, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="sglang")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help=arms)
    add_threads(parser)
    parser.add_argument("--work", type=Path, default=WORK, help="directory of the pair, prepared if it is not there")
    parser.add_argument("--out", type=Path, help=f"directory of rows and logs (default: {out}-ENGINE)")
    return parser


def real_setting(engine: Engine, prompts: ChatPrompts, ends: str, host: Host) -> dict[str, Any]:
    """What a row says of its run, whatever is measured. ends: see scenarios.py."""
    return {
        "engine": engine.name,
        "target": "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "base": BASE,
        "prompts": f"{prompts.part} {prompts.digest[:12]}",
        "ends": ends,
        **host.setting,
    }


def drawing_client(engine: Engine, tokens: int) -> Callable[[str], Client]:
    """Makes clients of servers' addresses, whose answers have lengths of their own, `tokens` in the mean."""

    def client_of(url: str) -> Client:
        found = engine.client(url, tokens)
        found.lengths = lengths_of(tokens)
        return found

    return client_of


def starting(runner: Runner, arms: Mapping[str, Arm], on: Speculation) -> Callable[[str], Server]:
    """Makes the server of an arm, by name, and prints that it starts."""

    def server(name: str) -> Server:
        print(f"{name}: starting", flush=True)
        return runner.server(name, arms[name], on)

    return server


def console() -> Console:
    """To print tables on: a pipe has no width of its own, and 80 columns break words."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def measure_once(prog: str, out: Path, measure: Callable[[Path], Sequence[BenchRow]]) -> int:
    """Measure into a directory, append the rows and print them; the exit status, 1 if an arm failed, 2 if nothing could
    be run."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    try:
        rows = measure(out)
    except C2TError as error:
        print(f"{prog}: {one_line(error)}", file=sys.stderr)
        return 2
    append_rows(out / "rows.jsonl", rows)
    console().print(Markdown(listing(rows)))
    return 1 if any(row.error for row in rows) else 0
