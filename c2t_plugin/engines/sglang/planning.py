"""`--speculative-c2t-beta auto`: how many of a step's draft tokens are verified, decided over all requests together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from c2t_plugin.planner import CostCurve, spend
from c2t_plugin.profiling import CostProfile

logger = logging.getLogger(__name__)


class StepPlanner:
    """Spends the target's pass where the cost curve and the confidences of the draft say that it pays.

    The draft is as deep as the server was told, since its loop is captured as a whole: what is chosen is how much of it
    is verified, down to nothing. Confidences say nothing about a token's own random draw, so neither does a choice.

    curve: None measures one on the first steps and, if there is a path, writes it there. sizes: token counts of the
    target's captured passes. steps: of a draft. most: draft tokens of one request that can be verified.
    """

    def __init__(
        self, curve: CostCurve | None, path: Path | None, *, steps: int, most: int, device: torch.device
    ) -> None:
        self.active = True
        self.curve = curve
        self.sizes: Callable[[], Sequence[int]] = tuple
        # Whether what is not verified is not computed; without that nothing is won by verifying less.
        self.compact = False
        self._path = path
        self._passes = steps - 1
        self._profile: CostProfile | None = None
        if curve is None:
            self._profile = CostProfile(most, self._passes, _waiting_for(device))
        self._forced: int | None = None

    @contextmanager
    def timed(self, part: str, count: Callable[[], int]) -> Iterator[None]:
        """See CostProfile.timed."""
        if self._profile is None or self._forced is None:
            yield
            return
        with self._profile.timed(part, count):
            yield

    def begin(self, requests: int) -> None:
        """Before each draft."""
        if self._profile is None:
            return
        before = self._forced
        self._forced = self._profile.length(requests) if self.active and self.compact else None
        if before is not None and self._forced is None:
            self._learn(self._profile.curve())

    def _learn(self, curve: CostCurve | None) -> None:
        if curve is None or curve == self.curve:
            return
        self.curve = curve
        logger.info("C2T: cost of a step, measured: %s", curve)
        if self._path is not None:
            try:
                curve.save(self._path)
            except OSError as error:
                logger.error("C2T: the cost curve cannot be written to %s: %s", self._path, error)

    def keep(self, kept: Tensor, own: Tensor, confidence: Tensor) -> Tensor:
        """(rows,) int32 draft tokens to verify. kept: (rows,) int32, at most so many. own: (rows,) bool, requests that
        have a beta of their own; of those it is exactly so many. confidence: (rows, tokens) float32, of a request's
        draft tokens in the order in which they are taken."""
        if not (self.active and self.compact):
            return kept
        if self._forced is not None:
            return torch.where(own, kept, kept.clamp(max=self._forced))
        if self.curve is None:
            return kept
        # the one wait: the host chooses the graph
        host = torch.cat([confidence, kept[:, None], own[:, None]], dim=1).cpu()
        longest = host[:, -2].long()
        budget = spend(
            host[:, :-2], self.curve, self._passes, longest, torch.where(host[:, -1] > 0, longest, 0), self.sizes()
        )
        return budget.kept.int().to(kept.device)

    def state(self) -> dict[str, Any]:
        """active: whether it decides. curve: whether it has one to decide by."""
        return {"active": self.active and self.compact, "curve": self.curve is not None}


def _waiting_for(device: torch.device) -> Callable[[], None]:
    wait: Callable[[], None] = torch.get_device_module(device).synchronize
    return wait
