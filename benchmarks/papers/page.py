"""Experiments' rows on a terminal, and as one Markdown page."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.papers import freshness
from benchmarks.papers.experiment import Cell, Experiment, Findings, Registry
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.experiment_rows import latest
from c2t_plugin.output import check_file, check_folder, write_text, write_whole

ROWS = "rows.jsonl"
# of experiments that ran on the real pair too
REAL_ROWS = "real-rows.jsonl"
ON_REAL = "On [SmolLM2-135M and its EAGLE-3 head](smollm2.md), development prompts:"
PIPE_WIDTH = 160
# words of a remark that are read as a paragraph; of more, each sentence is an item of a list
PARAGRAPH = 40
COLOURS = 64
INTRODUCTION = """# The papers' tables and figures, on our pair

Written by `python -m benchmarks.papers --page`, from the rows of `python -m benchmarks.papers all`; do not edit.
Columns that start with *paper* are the paper's own figures, every other one was measured with the command below its
table. tau never counts the bonus token here unless a column says so.

Most classifiers that are fitted for this page see at most 40 prompts, which handicaps the paper's recipe: [on all
prompts](classifiers.md#the-papers-own-recipe) it does better.

The pair is small ([pair](pair.md)): a target of 5 layers on Python source. Compare which rule needs fewer candidates
at the same accept length, not absolute figures. What this project set itself as goals stands [at the
end](#goal-candidates-of-trees-at-equal-tau), reached or not.
"""


def text_of(cell: Cell) -> str:
    """A cell as it is printed: three decimals for a fraction, nothing for None."""
    if cell is None:
        return ""
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def show(experiment: Experiment, found: Findings, seconds: float) -> None:
    """Print one table."""
    table = Table(title=f"{experiment.title}\n{experiment.source}")
    for column in experiment.columns:
        table.add_column(column, overflow="fold")
    for row in found.rows:
        table.add_row(*(text_of(row[column]) for column in experiment.columns))
    # a pipe has no width of its own, and 80 columns break words
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    console.print(table)
    console.print(f"{found.remark} ({experiment.name}, {seconds:.0f} s)".strip(), highlight=False)


def write(page: Path, out: Path, registry: Registry) -> int:
    """Write the page of all experiments that have rows, with pictures in a folder of its name; returns 0."""
    check_file(page)
    pictures = page.with_suffix("")
    if pictures == page:
        raise C2TError(f"cannot write {page}: its pictures go into a folder of that name; name a file with .md")
    check_folder(pictures)
    records = latest(out / ROWS)
    real = latest(out / REAL_ROWS) if (out / REAL_ROWS).is_file() else {}
    parts = [INTRODUCTION]
    known = [experiment for experiment in registry.experiments.values() if experiment.name in records]
    sections = [section(experiment, records[experiment.name]) for experiment in known]
    for experiment, text in zip(known, sections, strict=True):
        parts.append(text)
        picture = out / f"{experiment.name}.png"
        shown = pictures / picture.name
        if picture.is_file():
            _save_small(picture, shown)
        # rows that were not run again keep the picture that the page has of them
        if shown.is_file():
            parts.append(f"![{experiment.title}]({shown.parent.name}/{shown.name})\n")
        if experiment.name in real:
            parts.append(f"{ON_REAL}\n\n{body(experiment, real[experiment.name], real=True)}")
    missing = [name for name in registry.experiments if name not in records]
    if missing:
        parts.append(f"Not run for this page: {', '.join(missing)}.\n")
    write_text(page, "\n".join(parts))
    return 0


def section(experiment: Experiment, record: Mapping[str, Any]) -> str:
    """One experiment as Markdown. C2TError if the rows are of an older version of it."""
    return f"## {experiment.title}\n\n{experiment.source}.\n\n{body(experiment, record)}"


def body(experiment: Experiment, record: Mapping[str, Any], real: bool = False) -> str:
    """Its table, remark and source, and whether it is of what ships. real: of the real pair. C2TError as in section."""
    run = record["run"]
    lines = ["| " + " | ".join(experiment.columns) + " |"]
    lines.append("| " + " | ".join("---" for _ in experiment.columns) + " |")
    for row in record["rows"]:
        if set(row) != set(experiment.columns):
            raise C2TError(f"the rows of {experiment.name} have other columns than it has now; run it again")
        lines.append("| " + " | ".join(text_of(row[column]) for column in experiment.columns) + " |")
    if record["remark"]:
        lines += ["", *laid_out(record["remark"])]
    state = " with uncommitted changes" if run["dirty"] else ""
    commit = (run["git_sha"] or "unknown")[:12]
    lines += [
        "",
        f"`python -m benchmarks.papers {experiment.name}`, {run['machine']}, {run['utc'][:10]}, "
        f"commit {commit}{state}. {freshness.remark(record, real)}".rstrip(),
        "",
    ]
    return "\n".join(lines)


def laid_out(remark: str) -> list[str]:
    """Lines of Markdown of what an experiment says of its rows, word by word: a paragraph, or, of a long one, a list.

    Of a long sentence that lists something after a colon, parts between semicolons are items below it.
    """
    if len(remark.split()) <= PARAGRAPH:
        return [remark]
    lines = []
    for sentence in re.split(r"(?<=\.) ", remark):
        head, colon, rest = sentence.partition(": ")
        if colon and "; " in rest and len(sentence.split()) > PARAGRAPH:
            lines += [f"- {head}:", *(f"  - {part}" for part in re.split(r"(?<=;) ", rest))]
        else:
            lines.append(f"- {sentence}")
    return lines


def _save_small(picture: Path, target: Path) -> None:
    """The picture in few colours, which a repository can carry in every version, with the text fields it has."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    with Image.open(picture) as image:
        fields = PngInfo()
        for name, value in image.info.items():
            if isinstance(name, str) and isinstance(value, str):
                fields.add_text(name, value)
        small = image.convert("RGB").quantize(COLOURS)
        write_whole(target, partial(small.save, format="PNG", optimize=True, pnginfo=fields))
