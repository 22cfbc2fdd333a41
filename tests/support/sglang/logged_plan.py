"""A plan of a simulation that decides what was logged, step by step, of one request at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoggedPlan:
    """In the place of planned_rule.Plan. steps: of each its `depth`, whether it has `scores`, and by request the
    `confidence` of its drafts and how many tokens were `kept`. off: how far confidences are from the simulated ones,
    inf where a scored step has none."""

    steps: list[dict[str, Any]]
    ends: bool = False
    depths: list[int] = field(default_factory=list)
    off: float = 0.0

    def depth(self, requests: int, own: Sequence[Any] = ()) -> int:
        self.depths.append(self.steps[len(self.depths)]["depth"])
        return self.depths[-1]

    def keep(self, chances: Sequence[Sequence[float]], own: Sequence[Any] = ()) -> list[int]:
        step = self.steps[len(self.depths) - 1]
        for found, expected in zip(step["confidence"], chances, strict=True):
            known = [(one, other) for one, other in zip(found, expected, strict=True) if not math.isnan(one)]
            assert step["scores"] or not known
            unknown = [math.inf] if step["scores"] and not known else []
            self.off = max([self.off, *unknown, *(abs(one - other) for one, other in known)])
        kept: list[int] = step["kept"]
        return kept
