"""What the draft tokens of the steps before were expected to bring: for a step whose own nobody has read yet."""

from __future__ import annotations

from collections import deque

import numpy as np

from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.budget import sums

# Steps of each depth that are looked back on.
MEMORY = 8


class RecentGains:
    """Expected accepted tokens of the last MEMORY steps of each depth, by how many draft tokens are verified."""

    def __init__(self) -> None:
        # of each step its requests, and the sums of its best 0, 1, 2, ... tokens
        self._steps: dict[int, deque[tuple[int, Array]]] = {}

    def note(self, chain: Array) -> None:
        """chain: (requests, depth) float64, how likely each draft token is accepted with all before it."""
        requests, depth = chain.shape
        best = -np.sort(-chain, axis=None)
        self._steps.setdefault(depth, deque(maxlen=MEMORY)).append((requests, sums(best)))

    def expected(self, requests: int, depth: int) -> Array | None:
        """(requests * depth + 1,) float64 accepted tokens of a step of so many requests, by draft tokens verified.

        The mean over the steps that are known, each as if it had had so many requests; None without any.
        """
        known = self._steps.get(depth)
        if not known:
            return None
        found: Array = np.mean([_as_of(requests, depth, *each) for each in known], axis=0)
        return found


def _as_of(requests: int, depth: int, then: int, curve: Array) -> Array:
    """The sums of a step of `then` requests as if it had had so many: on the lines between its entries."""
    if then == requests:
        return curve
    counts = np.arange(requests * depth + 1) * (then / requests)
    found: Array = np.interp(counts, np.arange(len(curve)), curve) * (requests / then)
    return found
