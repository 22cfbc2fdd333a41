"""What the commands share that replay a stream of recorded states: their options, tables and rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report.rows import BenchRow, append_rows
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord
from c2t_plugin.traces.file import Traces

# Prompts that are served at a time.
CONCURRENT = 8


def _parser(name: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.simulation.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--learn", type=Path, required=True, help="traces that are served")
    parser.add_argument("--judge", type=Path, required=True, help="traces of other prompts")
    parser.add_argument("--offline", type=Path, required=True, help="classifier that was fitted on this pair")
    parser.add_argument(
        "--from", dest="start", action="append", default=[], metavar="NAME=FILE", help="one to start from"
    )
    parser.add_argument("--name", required=True, help="what rows call the stream")
    at_once = "prompts that are served at a time"
    parser.add_argument("--requests", type=int, default=CONCURRENT, help=f"{at_once} (default: {CONCURRENT})")
    out = Path(f"build/simulate/{name}.jsonl")
    parser.add_argument("--out", type=Path, default=out, help="rows are appended here")
    return parser


def replay(
    name: str,
    argv: list[str],
    description: str | None,
    rows_of: Callable[[argparse.Namespace, Mapping[str, Any]], Iterator[BenchRow]],
    table: Callable[[list[BenchRow], str], list[str]],
    metrics: Sequence[str],
) -> int:
    """The command of this name: make its rows, print a table of each metric, and append them. Status 2 with one line if
    an input does not hold."""
    options = _parser(name, description).parse_args(argv)
    try:
        rows = list(rows_of(options, RunRecord.capture().to_json()))
    except C2TError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    for metric in metrics:
        print("\n".join(table(rows, metric)), end="\n\n")
    append_rows(options.out, rows)
    return 0


def visits(traces: Traces, accepted: Tensor, at_once: int = CONCURRENT) -> Iterator[int]:
    """States in the order in which they are served, for ever. accepted: (states,) int64 tokens of each chain. at_once:
    prompts."""
    rows = [range(first, last) for first, last in zip(traces.first.tolist(), _ends(traces), strict=True)]
    pass_ = 0
    while True:
        waiting = list(rows)
        live: list[Iterator[int]] = []
        while waiting or live:
            while waiting and len(live) < at_once:
                live.append(_walk(waiting.pop(0), pass_ % CONCURRENT, accepted))
            step = [(walk, state) for walk in live if (state := next(walk, None)) is not None]
            yield from (state for _, state in step)
            live = [walk for walk, _ in step]
        pass_ += 1


def _ends(traces: Traces) -> list[int]:
    return [*traces.first.tolist()[1:], len(traces)]


def _walk(states: range, start: int, accepted: Tensor) -> Iterator[int]:
    place = start
    while place < len(states):
        yield states[place]
        place += 1 + int(accepted[states[place]])


def repeated(traces: Traces, times: int) -> Traces:
    """The chains of these so many times, each time as other prompts."""
    chain = traces.chain[torch.arange(len(traces)).repeat(times)]
    states = {name: each.repeat(times) for name, each in traces.states().items()}
    later = torch.arange(times).repeat_interleave(len(traces))
    states["prompt"] = traces.owner.repeat(times) + len(traces.first) * later
    return Traces(chain, chain, header=traces.header, **states)
