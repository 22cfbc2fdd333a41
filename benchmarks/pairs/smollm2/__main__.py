"""`python -m benchmarks.pairs.smollm2 prepare|prompts|lines|text|states|train|evaluate|check|ship`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pairs.smollm2.commands import check, evaluate, lines, prepare, prompts, ship, states, text, train
from benchmarks.pairs.smollm2.ship import WEIGHTS
from c2t_plugin.errors import C2TError

COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Any], str]] = {
    "prepare": (prepare, "write target, head and its classifiers to WORK/pair"),
    "prompts": (prompts, "write the development and frozen prompts again; packages as sources.py says"),
    "lines": (lines, "write prompts for `c2t collect`: WORK/train.jsonl and WORK/development.jsonl"),
    "text": (text, "let the target answer training prompts (vLLM); goes on where it stopped"),
    "states": (states, "keep the target's hidden states along its texts"),
    "train": (train, "train the head; goes on where it stopped"),
    "evaluate": (evaluate, "accept length on held-out prompts, by kind and depth"),
    "check": (check, "serve the prepared pair on stock SGLang's CPU engine and compare"),
    "ship": (ship, "write the trained head as it is shipped"),
}


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    top = argparse.ArgumentParser(prog="python -m benchmarks.pairs.smollm2", description=__doc__)
    top.add_argument(
        "command", choices=COMMANDS, help="; ".join(f"{name}: {said}" for name, (_, said) in COMMANDS.items())
    )
    top.add_argument("--work", type=Path, default=Path("build/smollm2"), help="directory of all that is made")
    top.add_argument("--sources", type=Path, help="directory with unpacked packages (default WORK/sources)")
    top.add_argument("--prompts", type=int, default=40000, help="training prompts to answer in all")
    top.add_argument(
        "--first", type=int, default=0, help="text: number of the first of them, to write others than before"
    )
    top.add_argument(
        # --words: its old name
        *("--vocabulary", "--words"),
        type=int,
        help="evaluate --trained, ship: tokens of the draft's vocabulary (default: as trained)",
    )
    top.add_argument("--steps", type=int, help="training steps in all; may be changed between runs")
    top.add_argument("--stop-after", type=int, help="training: leave after so many steps; run again to go on")
    top.add_argument("--weights", type=Path, default=WEIGHTS, help="directory of the shipped head")
    top.add_argument("--part", choices=("development", "frozen"), default="development", help="prompts to evaluate on")
    top.add_argument("--json", type=Path, help="evaluate: a file for the figures and where they come from")
    top.add_argument("--trained", action="store_true", help="evaluate the head in training instead of the shipped one")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 2 and one line on what the user can mend."""
    options = parser().parse_args(arguments)
    options.sources = options.sources or options.work / "sources"
    try:
        result = COMMANDS[options.command][0](options)
    except C2TError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if result is not None:
        print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
