"""Every arm at every concurrency and temperature on the real pair, on a CPU: rows of kind measured-cpu.

    python -m benchmarks.serving.matrix                                  SGLang, all cells
    python -m benchmarks.serving.matrix --engine vllm --concurrency 1 4 16 --temperature 0

Arms take turns in groups of servers that are up together; plain decoding is in every group, and ratios are to its
passes in the same rounds. A cell's row is appended once its passes are done; started again, a run skips cells that are
in the file. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.markdown import Markdown

from benchmarks.pairs.smollm2.commands import write_pair
from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.report.tables import listing
from benchmarks.serving.arms import chosen
from benchmarks.serving.cells import Matrix, add_sizes, fill, sizes_of
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.host import measure_host, threads_of
from benchmarks.serving.measuring import one_line
from benchmarks.serving.real_command import console, real_parser, real_setting
from benchmarks.serving.real_pair import chat_prompts, real_runner, real_speculation, use_threads
from benchmarks.serving.scenarios import DRAWN
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

CONCURRENCIES = (1, 2, 4, 8, 16, 32)
TEMPERATURES = (0.0, 0.7)


def _parser() -> argparse.ArgumentParser:
    parser = real_parser("matrix", __doc__, "only these arms", "build/matrix")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--temperature", type=float, nargs="+", default=list(TEMPERATURES))
    add_sizes(parser, max_tokens=64, least=4)
    parser.add_argument("--at-once", type=int, default=5, help="servers that are up together, up to 3.7 GB each")
    parser.add_argument("--beta", type=float, default=0.5, help="of the arm C2T")
    parser.add_argument("--threshold", type=float, default=0.3, help="of the arms threshold on P and closed form")
    return parser


def _matrix(options: argparse.Namespace, out: Path) -> Matrix:
    engine = ENGINES[options.engine]
    threads = threads_of(options)
    use_threads(threads)
    pair = write_pair(options.work)
    prompts = chat_prompts(pair / "target", options.part)
    host = measure_host(pair / "target", threads)
    on = real_speculation(engine, pair, out, options.beta, options.threshold)
    setting = {
        **real_setting(engine, prompts, DRAWN, host),
        "d_max": on.d_max,
        "beta": options.beta,
        "threshold": options.threshold,
        "max_tokens": options.max_tokens,
    }
    return Matrix(
        runner=real_runner(engine, pair, out, max(options.concurrency)),
        on=on,
        prompts=prompts,
        host=host,
        **sizes_of(options),
        setting=setting,
        run=RunRecord.capture(seed=0).to_json(),
    )


def main(argv: list[str]) -> int:
    """Measure, print the tables; status 1 if a cell failed, 2 if nothing could be run."""
    options = _parser().parse_args(argv)
    out: Path = options.out or Path(f"build/matrix-{options.engine}")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    path = out / "rows.jsonl"
    try:
        if options.at_once < 2:
            raise C2TError(f"--at-once is {options.at_once}; plain decoding and one arm more need 2")
        arms = chosen(options.engine, tuple(options.arms) if options.arms else None)
        matrix = _matrix(options, out)
        conditions = [(load, warmth) for warmth in options.temperature for load in options.concurrency]
        errors = fill(matrix, [(arm.name, at) for arm in arms for at in conditions], options.at_once, path)
    except C2TError as error:
        print(f"matrix: {one_line(error)}", file=sys.stderr)
        return 2
    shown = console()
    for temperature in options.temperature:
        rows = [row for row in read_rows(path, BenchRow) if row.setting["temperature"] == temperature]
        shown.print(f"temperature {temperature:g}")
        shown.print(Markdown(listing(rows)))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
