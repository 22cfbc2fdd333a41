"""Evaluations of `c2t evaluate --json` that are published, and how pages write their figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from c2t_plugin.errors import C2TError

FORMAT = "c2t-evaluation"
# what `python -m benchmarks.pairs.smollm2 evaluate --json` writes
HEAD_FORMAT = "c2t-head"

Part = Mapping[str, Any]


def load(path: Path, form: str = FORMAT) -> Part:
    """An evaluation of this format. C2TError if it is none, or if nobody could repeat it."""
    try:
        found: Part = json.loads(path.read_text(encoding="utf-8"))
        known, run = found["format"] == form, found["run"]
        clean = bool(run["command"] and run["git_sha"] and run["machine"]) and run["dirty"] is False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise C2TError(f"{path} is no evaluation; `evaluate --json` writes them: {error}") from error
    if not known or not clean:
        raise C2TError(f"{path} is no evaluation of a clean commit ({form}); commit, and run `evaluate --json` again")
    return found


def number(value: float | None, digits: int = 3) -> str:
    """As the page writes shares: without the zero before the point."""
    if value is None:
        return ""
    text = f"{value:.{digits}f}"
    return text.removeprefix("0") if text.startswith("0.") else text


def with_interval(value: float, interval: Sequence[float | None] | None) -> str:
    """A mean with its interval, where it has one."""
    if not interval or interval[0] is None or interval[1] is None:
        return number(value)
    return f"{number(value)} ({number(interval[0])} to {number(interval[1])})"


def rule(part: Part, name: str) -> Part:
    """The results of one rule."""
    return next(each for each in part["rules"] if each["name"] == name)


def against(found: Part, baseline: str) -> str:
    """Gamma over a baseline's, the mean over the taus."""
    compared = found["compared"][baseline]
    return with_interval(compared["mean"], compared["mean_interval"])
