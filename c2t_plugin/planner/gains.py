"""What the draft tokens of the steps before were expected to bring: for a step whose own nobody has read yet."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

# Steps of each depth that are looked back on.
MEMORY = 8


class RecentGains:
    """Expected accepted tokens of the last MEMORY steps of each depth, by how many draft tokens are verified."""

    def __init__(self) -> None:
        # of each step its requests, and the sums of its best 0, 1, 2, ... tokens
        self._steps: dict[int, deque[tuple[int, Tensor]]] = {}

    def note(self, chain: Tensor) -> None:
        """chain: (requests, depth) float64, how likely each draft token is accepted with all before it."""
        requests, depth = chain.shape
        best = chain.flatten().sort(descending=True).values.cumsum(0)
        sums = torch.cat([best.new_zeros(1), best])
        self._steps.setdefault(depth, deque(maxlen=MEMORY)).append((requests, sums))

    def expected(self, requests: int, depth: int) -> Tensor | None:
        """(requests * depth + 1,) float64 accepted tokens of a step of so many requests, by draft tokens verified.

        The mean over the steps that are known, each as if it had had so many requests; None without any.
        """
        known = self._steps.get(depth)
        if not known:
            return None
        counts = torch.arange(requests * depth + 1, dtype=torch.float64)
        curves = [_read(sums, counts * then / requests) * requests / then for then, sums in known]
        return torch.stack(curves).mean(0)


def _read(sums: Tensor, at: Tensor) -> Tensor:
    """sums read at fractional places, linear between its entries; its last entry beyond them."""
    last = len(sums) - 1
    below = at.long().clamp(max=last)
    share = at.clamp(max=last) - below
    return torch.lerp(sums[below], sums[(below + 1).clamp(max=last)], share)
