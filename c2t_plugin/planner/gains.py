"""What the draft tokens of the steps before were expected to bring: for a step whose own nobody has read yet."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

# Steps of each depth that are looked back on.
MEMORY = 8


class RecentGains:
    """Expected accepted tokens of the last MEMORY steps of each depth, by how many draft tokens are verified."""

    def __init__(self) -> None:
        # of each step its requests, and the sums of its best 0, 1, 2, ... tokens
        self._steps: dict[int, deque[tuple[int, np.ndarray]]] = {}

    def note(self, chain: Tensor) -> None:
        """chain: (requests, depth) float64, how likely each draft token is accepted with all before it."""
        requests, depth = chain.shape
        best = np.sort(chain.numpy(), axis=None)[::-1]
        sums = np.concatenate([[0.0], best.cumsum()])
        self._steps.setdefault(depth, deque(maxlen=MEMORY)).append((requests, sums))

    def expected(self, requests: int, depth: int) -> Tensor | None:
        """(requests * depth + 1,) float64 accepted tokens of a step of so many requests, by draft tokens verified.

        The mean over the steps that are known, each as if it had had so many requests; None without any.
        """
        known = self._steps.get(depth)
        if not known:
            return None
        counts = np.arange(requests * depth + 1)
        curves = [
            requests / then * np.interp(counts * then / requests, np.arange(len(sums)), sums) for then, sums in known
        ]
        return torch.from_numpy(np.mean(curves, axis=0))
