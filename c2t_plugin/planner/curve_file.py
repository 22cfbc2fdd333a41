"""A cost curve in a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from c2t_plugin import json_text
from c2t_plugin.errors import ConfigError
from c2t_plugin.output import write_text
from c2t_plugin.planner.curve import CostCurve

FORMAT = "c2t-cost-curve"
# What files of version 1 call draft_extend.
_FORMERLY = "keep_up"
MOST_BYTES = 1_000_000


def write_curve(curve: CostCurve, path: Path) -> None:
    """Write as JSON, whole or not at all. Raises OSError, or C2TError where something else than a file is."""
    write_text(path, json.dumps({"format": FORMAT, **dataclasses.asdict(curve)}, indent=1) + "\n")


def read_curve(path: Path) -> CostCurve:
    """Read what `write_curve` wrote. Raises ConfigError if the file is missing or is not a cost curve."""
    found = json_text.load(path, ConfigError, most=MOST_BYTES)
    if isinstance(found, Mapping) and _FORMERLY in found:
        found = {"draft_extend" if name == _FORMERLY else name: value for name, value in found.items()}
    names = {"format", "verify", "draft", "fixed", "draft_extend"}
    if not isinstance(found, Mapping) or set(found) != names or found["format"] != FORMAT:
        raise ConfigError(f"{path} is no cost curve: it needs exactly {', '.join(sorted(names))}, format {FORMAT!r}")
    try:
        verify, draft = (
            tuple((_number(count, int), float(_number(seconds))) for count, seconds in found[name])
            for name in ("verify", "draft")
        )
        return CostCurve(verify, draft, float(_number(found["fixed"])), float(_number(found["draft_extend"])))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is no cost curve: {error}") from error


def _number(value: Any, kinds: Any = (int, float)) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"expected a number, got a {type(value).__name__}")
    return value
