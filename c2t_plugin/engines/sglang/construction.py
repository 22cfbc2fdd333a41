"""Stock workers with a draft worker of ours, whose class their constructors name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def constructing(draft_class: type) -> Iterator[None]:
    """Within it the name of the stock draft class, the last base of ours, means ours."""
    stock = draft_class.__bases__[-1]
    module = sys.modules[stock.__module__]
    setattr(module, stock.__name__, draft_class)
    try:
        yield
    finally:
        setattr(module, stock.__name__, stock)
