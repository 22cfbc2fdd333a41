"""SGLang's own adaptive draft length, as far as a simulation can follow it."""

from __future__ import annotations

import torch
from torch import Tensor


class SglangAdaptive:
    """`--speculative-adaptive` of SGLang 0.5.23 with its own table: a running mean of the batch's accept length moves
    the draft length along the steps allowed at that batch size; from 0 steps on it tries the next one now and then."""

    # requests from which on: steps allowed, hysteresis on the way down
    TABLE = ((64, (0,), 0.0), (32, (0, 1), 0.0), (8, (0, 1, 3), 0.0), (1, (1, 3, 5, 7), -0.25))
    WEIGHT, WARM_UP, INTERVAL = 0.2, 10, 5

    def __init__(self, initial: int) -> None:
        self._slots = {
            least: _AdaptiveSlot(steps, initial if initial in steps else steps[len(steps) // 2], down)
            for least, steps, down in self.TABLE
        }
        self._now = self._slots[1]

    @classmethod
    def tokens(cls, requests: int) -> int:
        """The most that a step of up to so many requests verifies, roots included: fewer requests have longer
        chains."""
        longest = {n: next(steps[-1] for least, steps, _ in cls.TABLE if n >= least) for n in range(1, requests + 1)}
        return max(n * (1 + length) for n, length in longest.items())

    def depth(self, requests: int) -> int:
        self._now = next(self._slots[least] for least, _, _ in self.TABLE if requests >= least)
        return self._now.steps[self._now.at]

    def keep(self, outcome: Tensor) -> Tensor:
        """outcome: (requests, drafted) 1 where the target accepts; read only after all of them count as verified."""
        self._now.update(float(outcome.sum(1).mean()) if outcome.numel() else None)
        return torch.full((len(outcome),), outcome.shape[1])


class _AdaptiveSlot:
    def __init__(self, steps: tuple[int, ...], initial: int, down: float) -> None:
        self.steps, self.at, self.down = steps, steps.index(initial), down
        self.mean, self.batches = float(initial - 1), 0

    def update(self, accepted: float | None) -> None:
        if accepted is not None:
            self.mean += SglangAdaptive.WEIGHT * (accepted - self.mean)
        self.batches += 1
        since = self.batches - SglangAdaptive.WARM_UP
        if since > 0 and since % SglangAdaptive.INTERVAL == 0:
            self._move()

    def _move(self) -> None:
        if self.steps[self.at] == 0:
            self.at = min(1, len(self.steps) - 1)
            if self.mean < 0 < self.steps[self.at]:
                self.mean = float(self.steps[self.at] - 1)
            return
        before = self.at
        while self.at and self.mean <= max(self.steps[self.at - 1] - 0.5, 0.5) + self.down:
            self.at -= 1
        if self.at == before:
            while self.at + 1 < len(self.steps) and self.mean > self.steps[self.at] - 0.5:
                self.at += 1
