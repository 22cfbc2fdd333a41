"""Sections of generated pages: a head, pictures with their alternative text, tables with where their rows come from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report.rows import BenchRow
from benchmarks.report.tables import Block

# what a picture shows, for who does not see it
ALTERNATIVES = {
    "tau-gamma.png": "accept length against verified tokens per output token",
    "tau-gamma-vllm.png": "accept length against verified tokens per output token, on vLLM",
    "throughput.png": "simulated output tokens/s of each arm over plain decoding's, by requests in flight",
    "planner.png": "draft tokens that the planner verifies per request and step, by requests in flight",
    "measured.png": "output tokens/s over plain decoding's, measured on a GPU, by requests in flight",
    "measured-cpu.png": "output tokens/s of each arm, measured on a CPU, by requests in flight",
}


def picture(name: str) -> str:
    """A picture of docs/results as Markdown."""
    return f"![{ALTERNATIVES[name]}](results/{name})"


def of_scenario(blocks: Mapping[Block, list[BenchRow]], scenario: str, kind: str) -> list[list[BenchRow]]:
    """The blocks of one scenario and kind."""
    wanted = {("scenario", scenario), ("kind", kind)}
    return [found for block, found in blocks.items() if wanted <= set(block)]


def section(head: str, tables: Sequence[str], *pictures: str) -> list[str]:
    """Head, pictures by name, tables; nothing without a table."""
    if not tables:
        return []
    return [head, *(f"{picture(name)}\n" for name in pictures), *tables]


def as_typed(command: str) -> str:
    """A recorded command line as it is typed: a script of this directory runs as a module."""

    def module(script: re.Match[str]) -> str:
        return "python -m " + script[1].removesuffix("/__main__").replace("/", ".")

    return re.sub(r"^(benchmarks/[\w/]+)\.py", module, command)


def source_block(title: str, shown: str, remark: str, rows: Sequence[BenchRow]) -> str:
    """A table under its title, with a remark and the runs that its rows come from; all but the table may be empty."""
    runs = {row.run["utc"]: row.run for row in rows}
    sources = [source_line(run) for run in runs.values()]
    if len(runs) > 1:
        sources = [f"Rows of {len(runs)} runs, ratios within each.", *sources]
    return "\n\n".join(part for part in (title, shown, remark, *sources) if part) + "\n"


def source_line(run: Mapping[str, Any]) -> str:
    """Where rows of a run come from: command, machine, day, commit."""
    source = f"`{as_typed(run['command'])}`; {run['machine']}; {run['utc'][:10]}, commit {run['git_sha'][:12]}"
    return source + (", as declared by who published it." if run.get("git_sha_declared") else ".")
