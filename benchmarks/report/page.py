"""Writes a page of docs/ whose tables are made from rows: what the commands of such pages share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report.command import RESULTS
from benchmarks.report.rows import FILE_OF, BenchRow, read_rows
from c2t_plugin.errors import C2TError
from c2t_plugin.output import write_text


def write_page(
    command: str,
    argv: list[str],
    page: Path,
    render: Callable[[str, Sequence[BenchRow]], str],
    kinds: Sequence[str] = ("simulated",),
) -> int:
    """Write it anew; status 2 with one line if rows or page do not hold. command: the module's name, which has no
    options. render: the page's new text, of its text and the rows. kinds: of these."""
    describe = f"Write the tables of docs/{page.name} anew."
    argparse.ArgumentParser(prog=f"python -m benchmarks.report.{command}", description=describe).parse_args(argv)
    try:
        rows = [row for kind in kinds for row in read_rows(RESULTS / FILE_OF[kind], BenchRow)]
        write_text(page, render(page.read_text(encoding="utf-8"), rows))
    except C2TError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    return 0
