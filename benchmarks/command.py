"""How `python -m benchmarks.X` ends: an error that a user can act on is one line and status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from c2t_plugin.errors import C2TError

USAGE_ERROR = 2


def run(main: Callable[[list[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Call a command with these arguments, None for this process's; returns its exit status."""
    try:
        return main(list(sys.argv[1:] if arguments is None else arguments))
    except C2TError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
