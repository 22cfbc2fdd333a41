"""Rows of experiments: a JSON object a line, a table of its own each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from c2t_plugin import json_text
from c2t_plugin.errors import C2TError

# What every record has, and of which type.
KINDS = {"experiment": str, "quick": bool, "rows": list}


def latest(path: Path) -> dict[str, Mapping[str, Any]]:
    """The last record of every experiment of a rows file that was not `--quick`. C2TError if the file is not one."""
    if not path.is_file():
        raise C2TError(f"no rows in {path.parent}: run the experiments into that folder first")
    found: dict[str, Mapping[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        record = json_text.parse(line, f"{path.name}, line {number}")
        if not isinstance(record, dict) or any(not isinstance(record.get(name), kind) for name, kind in KINDS.items()):
            raise C2TError(f"{path.name}, line {number} is no row of an experiment: it needs {', '.join(KINDS)}")
        if not record["quick"]:
            found[record["experiment"]] = record
    return found
