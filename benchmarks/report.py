"""Rows to tables. The README's table lies between two markers and is never written by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import ServingRow, append_rows, read_rows
from c2t_plugin.errors import C2TError

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks/results/demo.jsonl"
BEGIN, END = "<!-- table:demo -->", "<!-- /table:demo -->"
COLUMNS = (
    "server",
    "concurrency",
    "tau (bonus excluded)",
    "gamma per output token",
    "verify steps",
    "identical to plain",
    "output tokens/s",
)


def latest_run(rows: Sequence[ServingRow], scenario: str) -> list[ServingRow]:
    """Rows of one scenario from the run that started last."""
    chosen = [row for row in rows if row.scenario == scenario]
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
        "" if row.tau is None else f"{row.tau:.2f}",
        "" if plain else f"{row.gamma_per_token:.2f}",
        "" if plain else f"{row.verify_steps:,}",
        f"{row.n_identical} of {row.n_prompts}",
        f"{row.output_tokens_per_s:.0f}",
    )


def markdown(rows: Sequence[ServingRow]) -> str:
    """The demo's table with a sentence on where it comes from; empty without rows.

    Raises C2TError if a row was measured on uncommitted code: nobody could repeat it.
    """
    shown = latest_run(rows, "demo")
    if not shown:
        return ""
    if any(row.run["dirty"] is not False for row in shown):
        raise C2TError("these rows were measured on uncommitted code; commit, run `make demo` again and publish that")
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *map(cells, shown)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    run = shown[0].run
    source = (
        f"{shown[0].n_prompts} held-out prompts, greedy, fp32, SGLang {run['versions']['sglang']} on its CPU engine; "
        f"{run['machine']}; {run['utc'][:10]}, commit {run['git_sha'][:12]}. "
        "The speeds only show that every server runs: a CPU run of a small model says nothing about a GPU."
    )
    return f"{table}\n\n{source}"


def render(readme: str, rows: Sequence[ServingRow]) -> str:
    """The README with the text between its markers replaced by the table of these rows."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise C2TError(f"the README needs the markers {BEGIN} and {END}, in this order")
    table = markdown(rows)
    return f"{before}{BEGIN}\n{table}{chr(10) * bool(table)}{END}{after}"


def main(argv: list[str]) -> int:
    """Rewrite the README's table from benchmarks/results, after adding the rows of --add."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=main.__doc__)
    parser.add_argument("--add", type=Path, help="rows to publish, e.g. build/demo/rows.jsonl")
    options = parser.parse_args(argv)
    try:
        added = read_rows(options.add, ServingRow) if options.add else []
        if options.add and not added:
            raise C2TError(f"{options.add} holds no rows; `make demo` writes build/demo/rows.jsonl")
        text = render(README.read_text(encoding="utf-8"), [*read_rows(RESULTS, ServingRow), *added])
    except C2TError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    append_rows(RESULTS, added)
    README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
