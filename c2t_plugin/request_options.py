"""What one request may ask of C2T, on every engine."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from c2t_plugin.errors import ConfigError

MOST = 2**31 - 1


@dataclass(frozen=True)
class RequestOptions:
    """One request's own settings; None means the server's.

    enabled: False verifies every draft token, as a static chain does. beta: in [0, 1]. max_depth: at most so many draft
    tokens are verified, 0 to MOST; what exceeds the server's own longest chain is that one. learn: False keeps its
    outcomes out of what the server learns.
    """

    enabled: bool = True
    beta: float | None = None
    max_depth: int | None = None
    learn: bool = True

    @classmethod
    def of(cls, values: Mapping[str, Any], prefix: str) -> RequestOptions:
        """From what a client has sent, by names from KEYS. Raises ConfigError; prefix: of a key in its message."""
        found = cls(**values)
        for name in ("enabled", "learn"):
            if not isinstance(getattr(found, name), bool):
                raise ConfigError(f"{prefix}{name} must be true or false, got {shown(getattr(found, name))}")
        if found.beta is not None and not (is_number(found.beta) and 0.0 <= found.beta <= 1.0):
            raise ConfigError(f"{prefix}beta must be a number in [0, 1], got {shown(found.beta)}")
        depth = found.max_depth
        if depth is not None and not (is_number(depth) and 0 <= depth <= MOST and depth == int(depth)):
            raise ConfigError(f"{prefix}max_depth must be a whole number from 0 to {MOST}, got {shown(depth)}")
        if not found.enabled and found.beta is not None:
            raise ConfigError(f"{prefix}beta has no meaning with {prefix}enabled false; leave one of them out")
        return found

    @property
    def threshold(self) -> float | None:
        """The beta to cut at; 0 cuts nothing."""
        return self.beta if self.enabled else 0.0

    @property
    def longest(self) -> int | None:
        """max_depth as an integer."""
        return None if self.max_depth is None else int(self.max_depth)


KEYS = tuple(item.name for item in fields(RequestOptions))


def is_number(value: Any) -> bool:
    """Which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Short and of letters that every log and answer can hold, whatever a client sends."""
    return ascii(reprlib.repr(value))[1:-1].replace("\\'", "'")
