"""`python -m benchmarks.papers`: run the papers' tables and figures on the project's own pair, theirs beside ours."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from c2t_plugin.errors import C2TError
from c2t_plugin.output import check_file, check_folder

if TYPE_CHECKING:
    from rich.console import Console

OUT = Path("build/reproduce")
TRACES = Path("build/lab")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments to run, or `all`")
    parser.add_argument("--list", action="store_true", help="list the experiments and stop")
    parser.add_argument("--out", type=Path, default=OUT, help=f"rows and pictures go there (default: {OUT})")
    parser.add_argument("--traces", type=Path, default=TRACES, help=f"trace files, collected if missing ({TRACES})")
    parser.add_argument("--pair", type=Path, help="pair directory (default: C2T_PAIR, else the shipped one)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random in an experiment")
    parser.add_argument(
        "--missing", action="store_true", help="only those without rows in --out, after an interruption"
    )
    parser.add_argument("--quick", action="store_true", help="few trees: shows that it runs, and nothing else")
    parser.add_argument("--page", type=Path, help="write this Markdown page from the rows in --out and stop")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    from rich.console import Console

    from benchmarks.papers import page
    from benchmarks.papers.catalogue import REGISTRY

    console = Console()
    if arguments.list:
        for experiment in REGISTRY.experiments.values():
            line = f"{experiment.name:<28}{experiment.title} ({experiment.source})"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return 0
    if arguments.page:
        return page.write(arguments.page, arguments.out, REGISTRY)
    if not arguments.names:
        raise C2TError("name an experiment, `all`, or --list")
    _run(arguments, console)
    return 0


def _run(arguments: argparse.Namespace, console: Console) -> None:
    from benchmarks.pairs.toy import pair_dir
    from benchmarks.papers import page
    from benchmarks.papers.catalogue import REGISTRY
    from benchmarks.papers.experiment import Bench
    from c2t_plugin.lab.pictures import save_png
    from c2t_plugin.provenance import RunRecord

    chosen = REGISTRY.chosen(arguments.names)
    check_file(arguments.out / page.ROWS)
    check_folder(arguments.traces)
    if arguments.missing and (arguments.out / page.ROWS).is_file():
        known = page.latest(arguments.out / page.ROWS)
        chosen = [experiment for experiment in chosen if experiment.name not in known]
    bench = Bench(arguments.pair or pair_dir(), arguments.traces, arguments.seed, arguments.quick)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, experiment in enumerate(chosen, start=1):
        console.print(f"{number} of {len(chosen)}: {experiment.name}", highlight=False)
        started = time.monotonic()
        bench.files.clear()
        found = experiment.findings(bench)
        page.show(experiment, found, time.monotonic() - started)
        run = RunRecord.capture(seed=arguments.seed)
        record = {
            "experiment": experiment.name,
            "rows": [dict(row) for row in found.rows],
            "remark": found.remark,
            "quick": arguments.quick,
            "files": dict(bench.files),
            "run": run.to_json(),
        }
        with (arguments.out / page.ROWS).open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record, sort_keys=True, allow_nan=False) + "\n")
        if found.figure is not None:
            save_png(found.figure, arguments.out / f"{experiment.name}.png", run)
