"""Arms by turns on a GPU: the real pair's acceptance at the cost of a large target, with intervals.

    python -m benchmarks.gpu.matrix --out OUT --models DIR        SmolLM2 in the shape of an 8B model
    python -m benchmarks.gpu.matrix --out OUT --models DIR --attention flashinfer --arms plain "static 2" "C2T auto"
    python -m benchmarks.gpu.matrix --out OUT --models DIR --dry-run --arms plain "static 2" "C2T as it comes"

writes the inflated pair to DIR unless it is there, starts all servers at the same time on one GPU, and measures them as
`benchmarks.serving.matrix` does: passes by turns, all servers but one stand still, ratios are of passes of the same
round. OUT/rows.jsonl gets a row per arm and load, OUT/states.jsonl what each C2T server says of itself after each, and
OUT/traces the profiler's traces of a few steps of some arms, at the end. In bfloat16 outputs differ where logits tie.
--dry-run: a small shape, in float32, a few answers on the CPU engine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.contests import GRAPH_SIZES
from benchmarks.gpu.environment import FLAGS, plugin_environment
from benchmarks.gpu.serving import build
from benchmarks.pairs.inflated.command import PRESETS
from benchmarks.pairs.smollm2.commands import write_pair
from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.report.tables import listing
from benchmarks.serving.arms import ARMS, chosen
from benchmarks.serving.breakdown import profiled
from benchmarks.serving.cells import Matrix, add_sizes, fill, sizes_of
from benchmarks.serving.engines import ENGINES, Device
from benchmarks.serving.engines.sglang import SglangClient
from benchmarks.serving.interleaved import Interleaved
from benchmarks.serving.measuring import Condition, one_line
from benchmarks.serving.real_pair import BASE, CONTEXT, PATIENCE_S, WORK, chat_prompts, real_speculation
from benchmarks.serving.scenarios import DRAWN
from benchmarks.serving.server import Runner
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

SCENARIO = "gpu-matrix"
SERVERS = ("plain", "static 1", "static 2", "static 4", "C2T as it comes")
LOADS, DRY_LOADS = (1, 2, 4, 8, 16, 32, 64), (2,)
BACKENDS = ("triton", "flashinfer")
# FlashInfer's extend would take FA3 on Hopper, and compile it there
PAGED = {"SGLANG_FLASHINFER_USE_PAGED": "1"}
START_TIMEOUT_S = 300.0
# of the arms that take one
BETA, THRESHOLD = 0.5, 0.3
TRACED = ("static 4", "EAGLE-2 tree", "C2T as it comes", "C2T tree ahead")
TRACED_LOADS = (1, 8)
TRACED_STEPS = 8
# of the servers' flags, what changes their logs alone: rows with and without it are of one setting
LOG_ONLY = re.compile(r"--decode-log-interval[ =]\d+ *")
# of the GPU's, that others take from as well: each server has the keys and values that it is told
MEMORY = "0.96"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.matrix", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of rows, states, traces and logs")
    parser.add_argument("--models", type=Path, required=True, help="directory of the inflated pair")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="the target's shape: 8b, or small in a dry run")
    parser.add_argument("--work", type=Path, default=WORK, help="directory of the small pair, prepared if need be")
    parser.add_argument("--arms", nargs="+", metavar="ARM", default=list(SERVERS), help=f"default: {SERVERS}")
    parser.add_argument("--attention", choices=BACKENDS, default=BACKENDS[0], help="of all servers")
    parser.add_argument("--concurrency", type=int, nargs="+", help=f"default: {LOADS}, in a dry run {DRY_LOADS}")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    add_sizes(parser, max_tokens=96, least=8)
    parser.add_argument("--tokens", type=int, default=40_960, help="keys and values that a server has room for")
    parser.add_argument("--trace", action="store_true", help="write the profiler's traces at the end")
    parser.add_argument("--server-args", default="", help="further flags of all servers")
    parser.add_argument("--dry-run", action="store_true", help="a small shape in float32, on the CPU engine")
    return parser


def runner_of(options: argparse.Namespace, scratch: Path) -> Runner:
    """Starts servers that share a GPU; in a dry run on the CPU engine."""
    most = max(options.concurrency)
    shared = ["--max-running-requests", str(most), "--max-total-tokens", str(options.tokens)]
    shared += ["--context-length", str(CONTEXT), "--watchdog-timeout", str(PATIENCE_S), *options.server_args.split()]
    target, logs = options.models / "target", options.out / "logs"
    if options.dry_run:
        return Runner(ENGINES["sglang"], Device.CPU, target, logs, tuple(shared))
    graphs = [str(size) for size in GRAPH_SIZES if size <= most]
    own = ["--mem-fraction-static", MEMORY, "--attention-backend", options.attention]
    flags = (*FLAGS, *own, "--cuda-graph-bs-decode", *graphs, *shared)
    environment = {**plugin_environment(scratch), **(PAGED if options.attention == "flashinfer" else {})}
    return Runner(ENGINES["sglang"], Device.GPU, target, logs, flags, environment, START_TIMEOUT_S)


def matrix_of(options: argparse.Namespace, scratch: Path) -> Matrix:
    """What is measured."""
    preset = options.preset or ("small" if options.dry_run else "8b")
    small = write_pair(options.work)
    build(options.models, preset, options.dry_run, small)
    prompts = chat_prompts(small / "target", options.part)
    setting = {
        "engine": "sglang",
        "target": f"SmolLM2-135M-Instruct inflated to {preset}",
        "dtype": "float32" if options.dry_run else "bfloat16",
        "base": BASE,
        "attention": "cpu engine" if options.dry_run else options.attention,
        "prompts": f"{prompts.part} {prompts.digest[:12]}",
        "ends": DRAWN,
        "max_tokens": options.max_tokens,
        "servers_at_once": len(options.arms),
    }
    if told := LOG_ONLY.sub("", options.server_args).strip():
        setting["server_args"] = told
    return Matrix(
        runner=runner_of(options, scratch),
        on=real_speculation(ENGINES["sglang"], options.models, options.out, BETA, THRESHOLD),
        prompts=prompts,
        host=None,
        **sizes_of(options),
        setting=setting,
        run=RunRecord.capture(seed=0).to_json(),
        scenario=SCENARIO,
        kind="functional" if options.dry_run else "measured",
        together=not options.dry_run,
    )


class Afterwards:
    """What is asked of the servers beside the rows: states after each load, traces after the last."""

    def __init__(self, out: Path, matrix: Matrix, last: Condition | None, dry_run: bool) -> None:
        self.out, self.matrix, self.last, self.dry_run = out, matrix, last, dry_run

    def __call__(self, contest: Interleaved, condition: Condition) -> None:
        with (self.out / "states.jsonl").open("a", encoding="utf-8") as file:
            for name in contest.names:
                if ARMS[name].c2t:
                    with contest.turn(name) as client:
                        said = {"arm": name, "condition": condition, "state": client.c2t_state()}
                        file.write(json.dumps(said) + "\n")
        if condition == self.last:
            self.trace(contest)

    def trace(self, contest: Interleaved) -> None:
        """A few steps of some arms, each at some loads."""
        for name in contest.names:
            for load in TRACED_LOADS if name in TRACED else ():
                with contest.turn(name) as client:
                    assert isinstance(client, SglangClient)
                    folder = self.out / "traces" / f"{name.replace(' ', '-')}-{load}"
                    try:
                        profiled(client, self.matrix.prompts.batch(0, load), TRACED_STEPS, folder, self.dry_run)
                    except C2TError as error:
                        print(f"no trace of {name} at {load}: {one_line(error)}", flush=True)


def main(argv: list[str]) -> int:
    """Measure, print the table; status 1 if a cell failed, 2 if nothing could be run."""
    options = _parser().parse_args(argv)
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    path = options.out / "rows.jsonl"
    options.concurrency = options.concurrency or list(DRY_LOADS if options.dry_run else LOADS)
    conditions = [(load, warmth) for warmth in options.temperature for load in options.concurrency]
    try:
        arms = chosen("sglang", tuple(options.arms))
        with tempfile.TemporaryDirectory() as scratch:
            matrix = matrix_of(options, Path(scratch))
            after = Afterwards(options.out, matrix, conditions[-1] if options.trace else None, options.dry_run)
            cells = [(arm.name, at) for arm in arms for at in conditions]
            errors = fill(replace(matrix, after=after), cells, len(arms), path)
    except C2TError as error:
        print(f"gpu.matrix: {one_line(error)}", file=sys.stderr)
        return 2
    print(listing(read_rows(path, BenchRow)))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
