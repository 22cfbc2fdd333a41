"""Recorded drafts and a cost curve to output tokens per second, for every arm and batch size, without a GPU.

    python -m benchmarks.simulation --traces build/lab/eagle3-held-out.traces --gpu L40
    python -m benchmarks.simulation --traces build/lab/draft-held-out.traces --table3
    python -m benchmarks.simulation --traces build/lab/eagle3-held-out.traces --tune

What is accepted is recorded; what it costs is arithmetic (`roofline`, or a measured curve). The figures compare arms
and predict no server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report.rows import BenchRow, append_rows
from benchmarks.report.simulated_page import simulated_cell, title_of
from benchmarks.report.tables import AUTO, load_of
from benchmarks.simulation.recorded import Replay, play, requests_of
from benchmarks.simulation.replays import STATIC, chain_arms, tree_arms
from benchmarks.simulation.roofline import GPUS, MODELS, Assumptions, Machine, Measured, draft_of
from benchmarks.simulation.setting import Setting
from benchmarks.simulation.steps import Policy, Simulated, planned
from benchmarks.simulation.table3 import show_table, table3
from c2t_plugin.errors import C2TError
from c2t_plugin.planner.curve_file import read_curve
from c2t_plugin.provenance import RunRecord

BATCHES = (1, 4, 8, 32, 64, 128, 256)
D_MAX = 6
# Waves of requests through the batch, and the least number of requests: with few waves its draining at the end counts
# as much as what the arms differ by, and with 60 steps in all so does a single one.
WAVES, LEAST = 32, 128
# What C2T auto is to be as fast as, whichever of them is best: what one would run without it.
RIVALS = ("plain", *(f"static {length}" for length in STATIC))
TUNING = {"probe_every": (16, 32, 64, 128, 256), "forget": (0.02, 0.05, 0.1, 0.2)}
PIPE_WIDTH = 160


def matrix(replay: Replay, setting: Setting, labels: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[BenchRow]:
    """Every arm at one batch size, each with its ratio to plain decoding and to the best static chain."""
    count = max(LEAST, WAVES * setting.requests)
    rows, request = requests_of(replay.traces, [replay.traces.header["new_tokens"]] * count)
    label = {**labels, "requests_in_flight": setting.requests}
    if not setting.fits:
        yield BenchRow(
            "simulated", "simulated", "all", label, {}, "weights and caches do not fit the GPUs' memory", run
        )
        return
    chains = replay.chains()
    contestants = [*chain_arms(replay, setting), *tree_arms(replay, setting)]
    beyond = {each.name: setting.beyond(each) for each in contestants}
    found = {each.name: play(each, chains, rows, request, setting) for each in contestants if not beyond[each.name]}
    for name, reason in beyond.items():
        metrics = {} if reason else _metrics(name, found)
        yield BenchRow("simulated", "simulated", name, label, metrics, reason, run)


def _metrics(name: str, found: Mapping[str, Simulated]) -> dict[str, float | None]:
    """One arm's figures; no ratio to what was not priced whole."""
    served = found[name]
    speeds = {other: each.tokens_per_s for other, each in found.items()}

    def over(*others: str) -> float | None:
        if any(other not in speeds for other in others):
            return None
        return served.tokens_per_s / max(speeds[other] for other in others)

    return {
        "output_tokens_per_s": served.tokens_per_s,
        "tau": served.tau if name != "plain" else None,
        "gamma_per_step": served.gamma,
        "gamma_per_token": served.gamma * served.requests * served.steps / served.tokens,
        "ratio_to_plain": over("plain"),
        "ratio_to_best_static": over(*(f"static {length}" for length in STATIC)),
        "ratio_to_best": over(*RIVALS),
    }


def tuned(replay: Replay, setting: Setting) -> Iterator[tuple[str, float]]:
    """The planner at each of TUNING: name and tokens per second over the best of all static lengths and plain.

    C2TError if the machine cannot price its largest step.
    """
    count = max(LEAST, WAVES * setting.requests)
    rows, request = requests_of(replay.traces, [replay.traces.header["new_tokens"]] * count)
    arms = {each.name: each for each in chain_arms(replace(replay, estimator=None), setting)}
    if reason := setting.beyond(arms[AUTO]):
        raise C2TError(f"the planner cannot be tuned at {setting.requests} requests: {reason}; name a smaller --batch")

    def speed(name: str, policy: Policy) -> float:
        return play(replace(arms[name], policy=policy), replay.chains(), rows, request, setting).tokens_per_s

    rivals = ["plain", *(f"static {length}" for length in STATIC)]
    best = max(speed(name, arms[name].policy) for name in rivals)
    curve = arms[AUTO].curve
    for probe_every in TUNING["probe_every"]:
        for forget in TUNING["forget"]:
            policy = planned(curve, setting.d_max, probe_every=probe_every, forget=forget)
            yield f"probe every {probe_every}, forget {forget:g}", speed(AUTO, policy) / best


def show(rows: Sequence[BenchRow], console: Console) -> None:
    """One line an arm, one column a batch size: tokens per second and the ratio to plain decoding."""
    batches = sorted({load_of(row) for row in rows})
    table = Table(title=f"simulated, {title_of(rows[0].setting)}: output tokens/s (ratio to plain)")
    for column in ("arm", *map(str, batches)):
        table.add_column(column, justify="left" if column == "arm" else "right")
    cells = {(row.arm, load_of(row)): row.error or simulated_cell(row) for row in rows}
    for arm in dict.fromkeys(row.arm for row in rows):
        table.add_row(arm, *(cells.get((arm, batch), "") for batch in batches))
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="held-out traces of `c2t collect`")
    parser.add_argument("--rivals-from", type=Path, help="training traces that vLLM's estimator learns from")
    parser.add_argument("--draft-name", help="in rows, of a draft of another pair than the toy one (default: its kind)")
    parser.add_argument("--gpu", choices=GPUS, default="H200", help="whose data sheet (default: H200)")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model (default: 1)")
    parser.add_argument("--target", choices=MODELS, default="llama-3.1-8b", help="whose shape")
    parser.add_argument("--context", type=int, default=Assumptions.context, help="cached tokens of a request")
    parser.add_argument(
        "--curve",
        type=Path,
        help="a measured cost curve (CostCurve.save) in place of a data sheet, of --tp, --target and --context",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="requests in flight")
    parser.add_argument("--table3", action="store_true", help="the paper's table 3 on one L40 and on four A100")
    parser.add_argument("--tune", action="store_true", help="the planner's two constants")
    parser.add_argument("--out", type=Path, default=Path("build/simulate/rows.jsonl"), help="rows are appended here")
    return parser


def main(argv: list[str]) -> int:
    """Simulate, print, append rows; status 2 with one line if an input does not hold."""
    options = _parser().parse_args(argv)
    # a pipe has no width of its own
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    try:
        replay = Replay.load(options.traces, options.rivals_from)
        rows = list(_rows(options, replay, console))
    except C2TError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    append_rows(options.out, rows)
    return 0


def _rows(options: argparse.Namespace, replay: Replay, console: Console) -> Iterator[BenchRow]:
    run = {**RunRecord.capture().to_json(), "files": dict(replay.files)}
    if options.table3:
        rows = list(table3(replay, run))
        show_table(rows, console)
        yield from rows
        return
    assumed = Assumptions(context=options.context)
    machine: Machine | Measured = Machine(GPUS[options.gpu], options.tp, assumed)
    name = options.gpu
    if options.curve:
        machine, name = Measured(read_curve(options.curve)), options.curve.stem
    target = MODELS[options.target]
    settings = [Setting(machine, target, draft_of(replay.kind, target), batch, D_MAX) for batch in options.batch]
    labels: dict[str, Any] = {"gpu": name, "tp": options.tp, "target": target.name, "context": options.context}
    labels["draft"] = options.draft_name or replay.kind
    if options.curve:
        # a curve does not say what it was measured with
        labels |= dict.fromkeys(("tp", "target", "context"))
    if options.tune:
        for setting in settings:
            for arm, ratio in tuned(replay, setting):
                label = {**labels, "requests_in_flight": setting.requests}
                console.print(f"{setting.requests} requests, {arm}: {ratio:.3f} of the best static arm or plain")
                yield BenchRow("planner", "simulated", arm, label, {"ratio_to_best": ratio}, "", run)
        return
    rows = [row for setting in settings for row in matrix(replay, setting, labels, run)]
    show(rows, console)
    yield from rows
