"""The lagged plan written out in plain Python over whole histories: how many rows a step gets, and what is clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

LAG = 2
MEMORY = 8


class Rule:
    """Steps one after another; each is told by its requests and by what the steps before it wanted."""

    def __init__(self, width: int, captured: Sequence[int] = ()) -> None:
        self.width, self.captured = width, captured
        # requests of every step, and draft tokens that they wanted
        self.steps: list[tuple[frozenset[str], int]] = []

    def rows(self, rids: Sequence[str]) -> int:
        now, window = frozenset(rids), len(rids) * self.width
        # of the step before nothing is known yet
        known = self._batch(now)[: 1 - LAG][-MEMORY:]
        needed = window
        if known:
            needed = len(now) + math.ceil(max(Fraction(wanted, len(then)) for then, wanted in known) * len(now))
        tiers = [tier for tier in self.captured if tier >= min(needed, window)]
        return min(tiers) if tiers else min(needed, window)

    def wanted(self, rids: Sequence[str], tokens: int) -> None:
        self.steps.append((frozenset(rids), tokens))

    def _batch(self, now: frozenset[str]) -> list[tuple[frozenset[str], int]]:
        """The steps before that belong to this one's batch."""
        batch: list[tuple[frozenset[str], int]] = []
        for then, wanted in reversed(self.steps):
            if len(then & now) * 2 < max(len(then), len(now)):
                break
            batch.insert(0, (then, wanted))
            now = then
        return batch


def above(confidence: Sequence[float], beta: float) -> int:
    """Draft tokens before the first one below beta."""
    return next((depth for depth, each in enumerate(confidence) if each < beta), len(confidence))


def clip(confidences: Sequence[Sequence[float]], wanted: Sequence[int], room: int) -> list[int]:
    """Drop one token after another until the rest fits: a last one, of lowest confidence; of equals the deepest, then
    that of the last request. A token's confidence is the lowest on the way to it."""
    kept = list(wanted)
    while sum(kept) > room:
        last = [(min(each[:n]), -n, -row) for row, (each, n) in enumerate(zip(confidences, kept, strict=True)) if n]
        kept[-min(last)[2]] -= 1
    return kept
