"""`make demo`: stock SGLang serves the shipped pair plain, with static chains and with C2T; a table and a picture.

Everything runs on the CPU engine, so it shows that the servers work and what they count, not how fast C2T is on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.cpu_engine.server import CpuServer
from benchmarks.pairs.toy import held_out_prompts, pair_dir
from benchmarks.report.command import COLUMNS, cells, server_name
from benchmarks.report.pictures import draw
from benchmarks.report.rows import ServingRow, append_rows
from benchmarks.serving.client import Client, Pass
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

STATIC_DEPTH = 4
D_MAX = 6
MAX_TOKENS = 40
CONCURRENCIES = (1, 8)
SWEEP_CONCURRENCY = 8
SWEEP_DEPTHS = tuple(range(1, D_MAX + 1))
SWEEP_BETAS = (0.1, 0.3, 0.5, 0.7, 0.9)
BASES = ("standalone", "eagle3")
DRAFTS = {"standalone": "draft", "eagle3": "eagle3"}
WARM_UP = 2
START_TIMEOUT_S = 600.0
SEED = 0
PIPE_WIDTH = 140


@dataclass(frozen=True)
class Server:
    """One server of the demo: its arm and base as rows name them, and its longest chain."""

    arm: str
    base: str
    d_max: int

    def flags(self, pair: Path) -> list[str]:
        """Flags of sglang.launch_server for this server, target and the CPU engine's own aside."""
        if self.arm == "plain":
            return []
        algorithm = "C2T" if self.arm == "c2t" else self.base.upper()
        return [
            *("--speculative-algorithm", algorithm),
            *("--speculative-draft-model-path", str(pair / DRAFTS[self.base])),
            *("--speculative-num-steps", str(self.d_max)),
            *("--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(self.d_max + 1)),
        ]

    @property
    def passes(self) -> int:
        """How often it answers all prompts."""
        return len(CONCURRENCIES) + (self.arm == "c2t") * (len(SWEEP_DEPTHS) + len(SWEEP_BETAS))

    def __str__(self) -> str:
        return "plain" if self.arm == "plain" else f"{self.base} {self.arm} {self.d_max}"


SERVERS = (
    Server("plain", "none", 0),
    *(Server("static", base, STATIC_DEPTH) for base in BASES),
    *(Server("c2t", base, D_MAX) for base in BASES),
)


class Demo:
    """One run: the prompts, the outputs of plain decoding to compare with, and the rows so far."""

    title = "C2T on SGLang's CPU engine: a functional check, not a speed claim"

    def __init__(self, prompts: list[list[int]], progress: Progress) -> None:
        self.prompts = prompts
        self.progress = progress
        self.record = RunRecord.capture(seed=SEED).to_json()
        self.rows: list[ServingRow] = []
        self.plain: Pass | None = None
        self.task = progress.add_task("", total=sum(server.passes for server in SERVERS) * len(prompts))

    def say(self, what: str) -> None:
        """Show what is being done: beside the bar on a terminal, as a line elsewhere."""
        self.progress.update(self.task, description=what)
        if not self.progress.console.is_terminal:
            self.progress.console.print(what, markup=False)

    def serve(self, server: Server, pair: Path, log: Path) -> None:
        """Start one server, measure it, stop it."""
        self.say(f"{server}: starting")
        with self.opened(server, pair, log) as client:
            for prompt in self.prompts[:WARM_UP]:
                client.complete(prompt)
            beta = client.c2t_state()["beta"] if server.arm == "c2t" else None
            for concurrency in CONCURRENCIES:
                self.measure(client, server, "demo", concurrency, beta)
            if server.arm == "c2t":
                self.sweep(client, server)

    @contextmanager
    def opened(self, server: Server, pair: Path, log: Path) -> Iterator[Client]:
        """A client of this server, which runs meanwhile."""
        running = CpuServer(pair / "target", *server.flags(pair), log=log, start_timeout=START_TIMEOUT_S)
        with running, Client(running.base_url, MAX_TOKENS) as client:
            yield client

    def sweep(self, client: Client, server: Server) -> None:
        """The picture's points, all on one running server: static chains (beta 0), then C2T over beta."""
        for depth in SWEEP_DEPTHS:
            client.control(beta=0.0, max_depth=depth)
            self.measure(client, Server("static", server.base, depth), "sweep", SWEEP_CONCURRENCY, None)
        for beta in SWEEP_BETAS:
            client.control(beta=beta, max_depth=server.d_max)
            self.measure(client, server, "sweep", SWEEP_CONCURRENCY, beta)

    def measure(self, client: Client, server: Server, scenario: str, concurrency: int, beta: float | None) -> None:
        """One pass of all prompts, as a row."""
        what = f"{server}{'' if beta is None else f', beta {beta:g}'}, concurrency {concurrency}"
        self.say(what)
        result = client.run(self.prompts, concurrency, lambda: self.progress.advance(self.task))
        self.plain = self.plain or result
        row = ServingRow(
            scenario=scenario,
            arm=server.arm,
            base=server.base,
            d_max=server.d_max,
            beta=beta,
            concurrency=concurrency,
            n_prompts=len(self.prompts),
            n_identical=result.n_identical(self.plain),
            output_tokens=result.output_tokens,
            tau=result.tau,
            gamma_per_token=result.gamma_per_token,
            verify_steps=result.verify_steps,
            output_tokens_per_s=result.output_tokens / result.seconds,
            run=self.record,
        )
        self.rows.append(row)


def table(rows: list[ServingRow], title: str) -> Table:
    """The rows of the demo as the terminal shows them."""
    shown = Table(*COLUMNS, title=title)
    for row in rows:
        shown.add_row(*cells(row))
    return shown


def different(rows: list[ServingRow]) -> Iterator[str]:
    """Rows whose outputs are not plain decoding's: greedy speculation is lossless, so there should be none."""
    for row in rows:
        if row.n_identical != row.n_prompts:
            name = f"{server_name(row)}, concurrency {row.concurrency}"
            yield f"{name}: only {row.n_identical} of {row.n_prompts} outputs equal plain decoding's"


def main(argv: list[str], engine: type[Demo] = Demo) -> int:
    """Serve, measure, print; status 1 if an output differed from plain decoding's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.demo", description=__doc__)
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts to send")
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="directory of rows, picture and server logs"
    )
    options = parser.parse_args(argv)
    # a pipe has no width of its own, and 80 columns break words
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        pair = pair_dir()
        with Progress(*columns, console=console) as progress:
            demo = engine(held_out_prompts(options.prompts, seed=SEED), progress)
            for server in SERVERS:
                demo.serve(server, pair, logs / f"{server}.log".replace(" ", "-"))
    except C2TError as error:
        console.print(f"demo: {error}\nThe servers' logs are in {logs}.", style="red", markup=False)
        return 2
    rows = options.out / "rows.jsonl"
    rows.unlink(missing_ok=True)
    append_rows(rows, demo.rows)
    draw([row for row in demo.rows if row.scenario == "sweep"], options.out / "tau_gamma.png")
    console.print(table([row for row in demo.rows if row.scenario == "demo"], demo.title))
    console.print(f"rows: {rows}; picture: {options.out / 'tau_gamma.png'}")
    differing = list(different(demo.rows))
    for line in differing:
        console.print(line, style="red", markup=False)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
