"""JSON that others may have made: whatever is wrong with it is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from c2t_plugin.errors import C2TError
from c2t_plugin.request_options import shown

# No file of ours comes near; a checkpoint's index of weights may have some.
MOST_BYTES = 64_000_000


def parse(text: str, what: str, error: type[C2TError] = C2TError, *, once: bool = True) -> Any:
    """The value. what: the text's name in a message. once: refuse an object that has a name twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique if once else None)
    except (ValueError, RecursionError) as cause:
        raise error(f"{what} is not valid JSON: {cause}") from cause


def load(path: Path, error: type[C2TError] = C2TError, *, most: int = MOST_BYTES, once: bool = True) -> Any:
    """The value in a UTF-8 file of at most so many bytes. Raises `error` if there is none."""
    try:
        # a device or a pipe may have no end
        if not path.is_file() or path.stat().st_size > most:
            raise error(f"{path} is no regular file of at most {most} bytes; expected JSON")
        return parse(path.read_text(encoding="utf-8"), str(path), error, once=once)
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"{path} is not readable: {cause}") from cause


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        # by hash, since a file may have a million names
        if name in found:
            raise ValueError(f"the name {shown(name)} comes twice")
        found[name] = value
    return found
