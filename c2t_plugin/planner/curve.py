"""Seconds of the parts of one decoding step on one machine, as a planner knows them."""

from __future__ import annotations

import dataclasses
import functools
import reprlib

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.errors import ConfigError

# What no machine takes or counts; beyond it sums and slopes overflow.
MOST_SECONDS, LEAST_SECONDS, MOST_COUNT = 1e6, 1e-12, 2**31 - 1


@dataclasses.dataclass(frozen=True)
class CostCurve:
    """Seconds of the parts of one decoding step on one machine.

    verify: (tokens, seconds) of the target's forward pass over so many tokens in all, roots included; at least two
    points. draft: (rows, seconds) of one draft forward pass; of chains each request has one row. fixed: seconds of a
    step that depend on neither. draft_extend: seconds that a step costs for the draft to read what was accepted,
    without which it cannot draft later; spent in plain decoding too, unless the engine does without it there.

    Points are joined by straight lines, and continued by the last one. A larger pass may take less than a smaller one:
    processors compute some sizes badly.
    """

    verify: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, float], ...]
    fixed: float = 0.0
    draft_extend: float = 0.0

    def __post_init__(self) -> None:
        for name in ("verify", "draft"):
            points = getattr(self, name)
            counts = [count for count, _ in points]
            if len(points) < 2 or counts != sorted(set(counts)) or counts[0] < 1 or counts[-1] > MOST_COUNT:
                some = reprlib.repr(counts)
                raise ConfigError(f"cost curve: {name} needs two or more points of rising counts from 1 on, got {some}")
            if not all(LEAST_SECONDS <= seconds <= MOST_SECONDS for _, seconds in points):
                raise ConfigError(
                    f"cost curve: every time of {name} must be a positive number of seconds, got {reprlib.repr(points)}"
                )
        if not all(0 <= value <= MOST_SECONDS for value in (self.fixed, self.draft_extend)):
            raise ConfigError(
                f"cost curve: fixed and draft_extend must be 0 or more, got {self.fixed} and {self.draft_extend}"
            )

    @property
    def beside(self) -> float:
        """Seconds of a step beside its draft passes and the target's."""
        return self.fixed + self.draft_extend

    def verify_s(self, tokens: Tensor) -> Tensor:
        """Seconds of target passes over `tokens` tokens: any shape, any number type -> float64."""
        return _interpolate(self.verify, tokens)

    def verify_one(self, tokens: int) -> float:
        """The same of one number of tokens, remembered."""
        return _interpolated(self.verify, tokens)

    def draft_s(self, requests: int) -> float:
        """Seconds of one draft pass for so many requests' chains, or rows."""
        return _interpolated(self.draft, requests)


# Asked for several times a step, on the way of the next launch.
@functools.lru_cache(maxsize=1024)
def _interpolated(points: tuple[tuple[int, float], ...], at: int) -> float:
    return float(_interpolate(points, torch.tensor(at)))


def _interpolate(points: tuple[tuple[int, float], ...], at: Tensor) -> Tensor:
    counts, seconds = np.array(points).T
    x = at.double().numpy()
    # what fell from the last point but one to the last does not go on falling
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2]))
    # below the first point a pass costs what the first one does: weights have to be read anyway
    return torch.as_tensor(np.interp(x, counts, seconds) + slope * np.maximum(x - counts[-1], 0.0))
