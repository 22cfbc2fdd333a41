"""`make demo DEMO_ARGS="--pair toy"`: a stock engine serves the toy pair plain, with static chains and with C2T.

    python -m benchmarks.serving.demo --pair toy                  SGLang, on its CPU engine
    python -m benchmarks.serving.demo --pair toy --engine vllm    vLLM, on its CPU backend

Everything runs on a CPU, so it shows that the servers work and what they count, not how fast C2T is on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.pairs.toy import held_out_prompts
from benchmarks.report.command import COLUMNS, cells, server_name
from benchmarks.report.pictures import draw
from benchmarks.report.rows import ServingRow, append_rows
from benchmarks.serving.arms import ARMS, Arm, Speculation
from benchmarks.serving.client import Client, Pass
from benchmarks.serving.engines import ENGINES, Device, Engine
from benchmarks.serving.options import shipped
from benchmarks.serving.server import Runner
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
# of an engine, what the table's title calls it
BACKENDS = {"sglang": "SGLang's CPU engine", "vllm": "vLLM's CPU backend"}
WARM_UP = 2
SEED = 0
PIPE_WIDTH = 140


@dataclass(frozen=True)
class Contestant:
    """One server of the demo. arm: as rows name it. base: of its draft, "none" without one. d_max: longest chain."""

    arm: str
    base: str
    d_max: int

    @property
    def in_table(self) -> Arm:
        """The arm itself."""
        return ARMS[{"plain": "plain", "static": f"static {self.d_max}", "c2t": "C2T"}[self.arm]]

    def runner(self, engine: Engine, out: Path) -> tuple[Runner, Speculation]:
        """What starts its server, and what fills in its arm. C2T takes the threshold of the classifier's file."""
        base = BASES[0] if self.base == "none" else self.base
        found = shipped(engine, base, out)
        on = Speculation(draft=found.draft, base=base, d_max=self.d_max, classifier=found.classifier)
        return Runner(engine, Device.CPU, found.target, out / "logs"), on

    @property
    def passes(self) -> int:
        """How often it answers all prompts."""
        return len(CONCURRENCIES) + (self.arm == "c2t") * (len(SWEEP_DEPTHS) + len(SWEEP_BETAS))

    def __str__(self) -> str:
        return "plain" if self.arm == "plain" else f"{self.base} {self.arm} {self.d_max}"


CONTESTANTS = (
    Contestant("plain", "none", 0),
    *(Contestant("static", base, STATIC_DEPTH) for base in BASES),
    *(Contestant("c2t", base, D_MAX) for base in BASES),
)


class Demo:
    """One run: the prompts, the outputs of plain decoding to compare with, and the rows so far."""

    def __init__(self, engine: Engine, out: Path, prompts: list[list[int]], progress: Progress) -> None:
        self.engine, self.out = engine, out
        self.prompts = prompts
        self.progress = progress
        self.record = RunRecord.capture(seed=SEED).to_json()
        self.rows: list[ServingRow] = []
        self.plain: Pass | None = None
        self.task = progress.add_task("", total=sum(each.passes for each in CONTESTANTS) * len(prompts))

    def say(self, what: str) -> None:
        """Show what is being done: beside the bar on a terminal, as a line elsewhere."""
        self.progress.update(self.task, description=what)
        if not self.progress.console.is_terminal:
            self.progress.console.print(what, markup=False)

    def serve(self, contestant: Contestant) -> None:
        """Start its server, measure it, stop it."""
        self.say(f"{contestant}: starting")
        runner, on = contestant.runner(self.engine, self.out)
        with (
            runner.server(str(contestant), contestant.in_table, on) as server,
            self.engine.client(server.base_url, MAX_TOKENS) as client,
        ):
            for prompt in self.prompts[:WARM_UP]:
                client.complete(prompt)
            beta = client.c2t_state()["beta"] if contestant.arm == "c2t" else None
            for concurrency in CONCURRENCIES:
                self.measure(client, contestant, "demo", concurrency, beta)
            if contestant.arm == "c2t":
                self.sweep(client, contestant)

    def sweep(self, client: Client, contestant: Contestant) -> None:
        """The picture's points, all on one running server: static chains (beta 0), then C2T over beta."""
        for depth in SWEEP_DEPTHS:
            client.control(beta=0.0, max_depth=depth)
            self.measure(client, Contestant("static", contestant.base, depth), "sweep", SWEEP_CONCURRENCY, None)
        for beta in SWEEP_BETAS:
            client.control(beta=beta, max_depth=contestant.d_max)
            self.measure(client, contestant, "sweep", SWEEP_CONCURRENCY, beta)

    def measure(
        self, client: Client, contestant: Contestant, scenario: str, concurrency: int, beta: float | None
    ) -> None:
        """One pass of all prompts, as a row."""
        what = f"{contestant}{'' if beta is None else f', beta {beta:g}'}, concurrency {concurrency}"
        self.say(what)
        result = client.run(self.prompts, concurrency, lambda: self.progress.advance(self.task))
        self.plain = self.plain or result
        row = ServingRow(
            scenario=scenario,
            arm=contestant.arm,
            base=contestant.base,
            d_max=contestant.d_max,
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


def main(argv: list[str]) -> int:
    """Serve, measure, print; status 1 if an output differed from plain decoding's."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.demo --pair toy",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--engine", choices=ENGINES, default="sglang", help="which one serves (default: sglang)")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts to send")
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo-toy"), help="directory of rows, picture and server logs"
    )
    options = parser.parse_args(argv)
    # a pipe has no width of its own, and 80 columns break words
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        with Progress(*columns, console=console) as progress:
            prompts = held_out_prompts(options.prompts, seed=SEED)
            demo = Demo(ENGINES[options.engine], options.out, prompts, progress)
            for contestant in CONTESTANTS:
                demo.serve(contestant)
    except C2TError as error:
        console.print(f"demo: {error}\nThe servers' logs are in {logs}.", style="red", markup=False)
        return 2
    rows = options.out / "rows.jsonl"
    rows.unlink(missing_ok=True)
    append_rows(rows, demo.rows)
    draw([row for row in demo.rows if row.scenario == "sweep"], options.out / "tau_gamma.png")
    title = f"C2T on {BACKENDS[options.engine]}: a functional check, not a speed claim"
    console.print(table([row for row in demo.rows if row.scenario == "demo"], title))
    console.print(f"rows: {rows}; picture: {options.out / 'tau_gamma.png'}")
    differing = list(different(demo.rows))
    for line in differing:
        console.print(line, style="red", markup=False)
    return 1 if differing else 0
