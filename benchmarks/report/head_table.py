"""The table of docs/smollm2.md on its head's acceptance, from what `smollm2 evaluate --json` wrote.

python -m benchmarks.report.head_table                    write the table between the page's markers
python -m benchmarks.report.head_table --add FILE         take in a newer evaluation first
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.report.command import RESULTS, ROOT
from benchmarks.report.evaluations import HEAD_FORMAT, Part, load, number, with_interval
from benchmarks.report.sections import source_line
from benchmarks.report.tables import filled, table
from c2t_plugin.errors import C2TError
from c2t_plugin.output import write_text

PAGE = ROOT / "docs/smollm2.md"
FILE = RESULTS / "head-smollm2.json"
NAME = "head"


def head_table(found: Part) -> str:
    """A line a temperature and kind of prompt: accepted draft tokens, of states that the text had not led to before,
    and the share of chains that is accepted to each depth."""
    depths = range(found["chain"])
    lines = [
        [
            f"{float(temperature):g}",
            kind,
            with_interval(each["mean"], each["interval"]),
            number(each["novel_states"]),
            *(number(each["depths"][depth]) for depth in depths),
            f"{each['texts']:,}",
        ]
        for temperature, kinds in found["temperatures"].items()
        for kind, each in kinds.items()
    ]
    head = ["temperature", "prompts", "accepted of a chain", "novel states"]
    head += [*(f"to depth {depth + 1}" for depth in depths), "texts"]
    of = f"{found['part']} prompts ({found['prompts'][:12]}), {found['new_tokens']} new tokens"
    return f"{table(head, lines)}\n\nChains of {found['chain']}, {of}. {source_line(found['run'])}"


def render(page: str) -> str:
    """The page with its table made anew. C2TError without the markers."""
    return filled(page, NAME, f"\n\n{head_table(load(FILE, HEAD_FORMAT))}\n\n", PAGE.name)


def main(argv: list[str]) -> int:
    """Write the table of docs/smollm2.md anew; status 2 with one line if a file does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.head_table", description=main.__doc__)
    parser.add_argument("--add", type=Path, metavar="FILE", help="of `python -m benchmarks.pairs.smollm2 evaluate`")
    options = parser.parse_args(argv)
    try:
        if options.add is not None:
            write_text(FILE, json.dumps(load(options.add, HEAD_FORMAT), indent=1) + "\n")
        write_text(PAGE, render(PAGE.read_text(encoding="utf-8")))
    except C2TError as error:
        print(f"head_table: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
