"""Rows of experiments: a JSON object a line, a table of its own each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from c2t_plugin.errors import C2TError


def latest(path: Path) -> dict[str, Mapping[str, Any]]:
    """The last record of every experiment of a rows file that was not `--quick`. C2TError if the file is not one."""
    if not path.is_file():
        raise C2TError(f"no rows in {path.parent}: run the experiments into that folder first")
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            if not record["quick"]:
                found[record["experiment"]] = record
        except (json.JSONDecodeError, KeyError) as error:
            raise C2TError(f"{path.name}, line {number} is no row of an experiment: {error}") from error
    return found
