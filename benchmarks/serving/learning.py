"""What running servers learn, by the draft tokens that they have verified: what they say of it themselves.

    python -m benchmarks.serving.learning --cpu --from SmolLM2=CLASSIFIER --from draft=CLASSIFIER
    python -m benchmarks.serving.learning --cpu --engine vllm          # in vLLM's environment

A server for each classifier to start from (--from; beside them the draft's own, and the draft's probability alone) and
each way to learn (--learn), all with the same prompts in the same order, 8 at a time (--concurrency): held-out ones of
the toy pair, with --chat chat prompts of SmolLM2's development part. They plan by the curve of a GPU's data sheet, on
which drafting pays, so what they verify does not follow from the speed of this machine. Nats and AUC are of the last
1,024 drafts, each as it was foretold before it came: by the classifier alone, and by what was learnt until then.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.pairs.toy import held_out_prompts
from benchmarks.report.rows import BenchRow, append_rows
from benchmarks.report.tables import listing
from benchmarks.serving.arms import ARMS, Speculation
from benchmarks.serving.client import Client
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.measuring import one_line
from benchmarks.serving.options import (
    OWN_CLASSIFIER,
    PAIR_DRAFTS,
    add_arm_options,
    dtype_of,
    kind_of,
    models,
    runner,
    speculation,
)
from benchmarks.serving.real_pair import chat_prompts
from benchmarks.serving.server import Runner
from benchmarks.simulation.learning import curve_of
from c2t_plugin.errors import C2TError
from c2t_plugin.planner.curve_file import write_curve
from c2t_plugin.provenance import RunRecord

SCENARIO = "learning-served"
P_ALONE = "P alone"
ARM = "C2T auto"
MARKS = (500, 2_000, 10_000)
# Of the held-out ones, over and over.
PROMPTS, MAX_TOKENS = 240, 96
# Without a mark after so many batches a server drafts nothing.
MOST_BATCHES = 400
PIPE_WIDTH = 180


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.learning",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--engine", choices=ENGINES, default="sglang")
    parser.add_argument("--from", dest="start", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--learn", nargs="+", default=["calibrate", "network"], metavar="HOW")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--name", default="toy, EAGLE-3", help="what rows call the pair")
    parser.add_argument("--chat", action="store_true", help="chat prompts, under the target's template")
    parser.add_argument("--marks", type=int, nargs="+", default=list(MARKS), help="draft tokens verified")
    add_arm_options(parser, Path("build/learning-served"))
    return parser


def figures(state: Mapping[str, Any]) -> dict[str, float]:
    """Of a server's `planner.learnt`. C2TError before it has verified anything."""
    if state["nll"] is None or state["auc"] is None:
        raise C2TError(f"the server has verified {state['seen']} draft tokens, and none or all of them were accepted")
    known = {name: state[name] for name in ("nll", "auc")}
    both = {f"{name}_{who}": values[at] for name, values in known.items() for at, who in enumerate(("prior", "learnt"))}
    counts = {"seen": state["seen"], "discarded": state["discarded"]}
    if "network" in state:
        counts["networks_in_force"] = state["network"]["swaps"]
    return {**counts, **both}


def at_marks(
    client: Client, marks: list[int], concurrency: int, asked: Sequence[Sequence[int]]
) -> Iterator[tuple[int, dict[str, float]]]:
    """The figures at each mark, of those that one batch passes at the last. C2TError if a server does not get there."""
    waiting, prompts = sorted(marks), itertools.cycle(asked)
    for _ in range(MOST_BATCHES):
        client.run(list(itertools.islice(prompts, concurrency)), concurrency, lambda: None)
        learnt = client.learnt()
        passed = [mark for mark in waiting if learnt["seen"] >= mark]
        if passed:
            yield passed[-1], figures(learnt)
            waiting = waiting[len(passed) :]
        if not waiting:
            return
    raise C2TError(f"not {waiting[0]:,} draft tokens verified after {MOST_BATCHES} batches of {concurrency} prompts")


def measure(
    options: argparse.Namespace,
    starts: Runner,
    on: Speculation,
    asked: Sequence[Sequence[int]],
    run: Mapping[str, Any],
) -> list[BenchRow]:
    """A row for each start, way and mark; a server that fails leaves its reason."""
    curve = options.out / "curve.json"
    write_curve(curve_of(PAIR_DRAFTS[options.base], options.concurrency), curve)
    label = {
        "stream": options.name,
        "engine": starts.engine.name,
        "target": starts.target.name,
        "dtype": dtype_of(options),
        "base": options.base,
        "d_max": options.d_max,
        "concurrency": options.concurrency,
    }
    kind, rows = kind_of(run, options.cpu), []
    files = {OWN_CLASSIFIER: on.classifier, **dict(each.split("=", 1) for each in options.start)}
    files[P_ALONE] = on.threshold_classifier
    for name, file in files.items():
        for how in options.learn:
            arm, told = f"from {name}, {how}", replace(on, classifier=file)
            own = starts.engine.flags({"c2t_planner": curve.resolve(), "c2t_learn": how})
            server = starts.server(f"{SCENARIO}-{name}-{how}".replace(" ", "-"), ARMS[ARM], told, *own)
            try:
                with server, starts.engine.client(server.base_url, MAX_TOKENS) as client:
                    for mark, metrics in at_marks(client, options.marks, options.concurrency, asked):
                        rows.append(BenchRow(SCENARIO, kind, arm, {**label, "verified": mark}, metrics, "", run))
            except C2TError as error:
                rows.append(BenchRow(SCENARIO, kind, arm, {**label, "verified": 0}, {}, one_line(error), run))
    return rows


def main(argv: list[str]) -> int:
    """Measure, print a table, append rows; status 1 if a server failed, 2 if the command is wrong."""
    options = _parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    run = RunRecord.capture(seed=0).to_json()
    try:
        if strange := [each for each in options.start if "=" not in each]:
            raise C2TError(f"--from is NAME=FILE; got {strange[0]!r}")
        engine = ENGINES[options.engine]
        found = models(options, engine)
        on = speculation(options, found)
        starts = runner(options, engine, found.target)
        asked = chat_prompts(found.target, "development").ids if options.chat else held_out_prompts(PROMPTS)
    except C2TError as error:
        print(f"learning: {error}", file=sys.stderr)
        return 2
    rows = measure(options, starts, on, asked, run)
    append_rows(options.out / "rows.jsonl", rows)
    console.print(Markdown(listing(rows)))
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
