"""What a planner expected of its steps, beside what came."""

from __future__ import annotations

from typing import Any

# Of a sum, what is left of it after a step: some two hundred steps count.
REMEMBERED = 0.995


class Ledger:
    """Output tokens and seconds of steps, expected and come. Each pair is of the same steps, the newest ones mostly."""

    def __init__(self) -> None:
        # expected, come
        self._sums = {"tokens": [0.0, 0.0], "seconds": [0.0, 0.0]}

    def add(self, what: str, expected: float, came: float) -> None:
        """One step. what: tokens or seconds."""
        pair = self._sums[what]
        pair[:] = [total * REMEMBERED + new for total, new in zip(pair, (expected, came), strict=True)]

    def state(self) -> dict[str, Any]:
        """As JSON: what came for each that was expected; None before a step is known."""
        return {what: came / expected if expected else None for what, (expected, came) in self._sums.items()}
