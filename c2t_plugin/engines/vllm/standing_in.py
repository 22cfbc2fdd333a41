"""Names of the engine that mean something of ours for a while."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def standing_in(substitutes: Iterable[tuple[str, str, Any]]) -> Iterator[None]:
    """Within the block each (module, name, ours) has `ours` under that name of that module."""
    with contextlib.ExitStack() as stack:
        for path, name, ours in substitutes:
            module = importlib.import_module(path)
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, ours)
        yield
