"""What stands in the place of something of SGLang's for a while: names and values that its code looks up."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it the owner's attribute of this name is the value."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def constructing(draft_class: type) -> contextlib.AbstractContextManager[None]:
    """Within it the name of the stock draft class, the last base of ours, means ours: workers' constructors name it."""
    stock = draft_class.__bases__[-1]
    return replaced(sys.modules[stock.__module__], stock.__name__, draft_class)
