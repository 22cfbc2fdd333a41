"""`--speculative-c2t-beta auto`: how deep each step drafts, and how much of that it verifies, all requests together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from c2t_plugin.planner import CostCurve, Planner
from c2t_plugin.policies.chain import ChainScorer
from c2t_plugin.profiling import CostProfile

logger = logging.getLogger(__name__)

# SGLang's draft extend, which lets the draft keep up, predicts the first draft token of the next step.
FREE = 1


def depths(d_max: int) -> tuple[int, ...]:
    """Rising, from 0 to d_max: each has CUDA graphs of its own, so few of those between."""
    return tuple(sorted({0, d_max, *(2**i for i in range(d_max.bit_length()) if 2**i < d_max)}))


class StepPlanner:
    """Drafts, and spends the target's pass, where the cost curve and the confidences of the draft say that it pays.

    How deep a step drafts follows from the steps before it; how much of that is verified, from its own confidences.
    They say nothing about a token's own random draw, so neither does a choice.

    curve: None measures one on the first steps and, if there is a path, writes it there. sizes: token counts of the
    target's captured passes.
    """

    def __init__(self, scorer: ChainScorer, curve: CostCurve | None, path: Path | None) -> None:
        self.active = True
        self.sizes: Callable[[], Sequence[int]] = tuple
        # Of the step at hand.
        self.depth = scorer.d_max
        self._scorer, self._path = scorer, path
        self._compact = False
        self._planner: Planner | None = None
        self._profile: CostProfile | None = None
        if curve is None:
            self._profile = CostProfile(self.depths, _waiting_for(scorer.beta.device))
        else:
            self.curve = curve
        self._forced = False

    @property
    def depths(self) -> tuple[int, ...]:
        """Those that are chosen from."""
        return depths(self._scorer.d_max)

    @property
    def curve(self) -> CostCurve | None:
        """What is decided by; None as long as it is measured."""
        return None if self._planner is None else self._planner.curve

    @curve.setter
    def curve(self, curve: CostCurve) -> None:
        if self._planner is None:
            self._planner = Planner(curve, self._scorer.d_max, depths=self.depths, free=FREE, compact=self._compact)
        self._planner.curve = curve

    @property
    def compact(self) -> bool:
        """Whether what is not verified is not computed; without that every drafted token is verified."""
        return self._compact

    @compact.setter
    def compact(self, compact: bool) -> None:
        self._compact = compact
        if self._planner is not None:
            self._planner.compact = compact

    @contextmanager
    def timed(self, part: str, count: Callable[[], int]) -> Iterator[None]:
        """See CostProfile.timed."""
        if self._profile is None or not self._forced:
            yield
            return
        # a chain of one has no draft pass, but a curve has to have a cost
        passes = max(self.depth - FREE, int(self.depth == self._scorer.d_max)) if part == "draft" else 1
        with self._profile.timed(part, count, passes):
            yield

    def begin(self, requests: int, whole: bool = False) -> int:
        """How deep to draft, asked before each step. whole: a request of it needs all its drafts."""
        before, self._forced = self._forced, False
        self.depth = self._scorer.d_max
        if not self.active or whole:
            return self.depth
        if self._profile is not None:
            length = self._profile.length(requests)
            if length is not None:
                self._forced, self.depth = True, length
                return length
            if before:
                self._learn(self._profile.curve())
        if self._planner is not None:
            self.depth = self._planner.depth(requests)
        return self.depth

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

    def keep(self, kept: Tensor, own: Tensor) -> Tensor:
        """(requests,) int32 draft tokens to verify of the last draft.

        kept: (requests,) int32, the most that single requests' own limits leave. own: (requests,) bool, which of them
        have a beta of their own; of those it is exactly so many."""
        if not self.active or self._forced or self._planner is None:
            return kept
        confidence = self._scorer.confidence(len(kept))
        # the one wait: the host chooses the graph
        host = torch.cat([confidence, kept[:, None], own[:, None]], dim=1).cpu()
        longest = host[:, -2].long()
        at_least = torch.where(host[:, -1] > 0, longest, 0)
        return self._planner.keep(host[:, :-2], longest, at_least, self.sizes()).int().to(kept.device)

    def state(self) -> dict[str, Any]:
        """active: whether it decides. curve: whether it has one to decide by. depth: of the last step's draft."""
        return {"active": self.active, "curve": self.curve is not None, "depth": self.depth}


def _waiting_for(device: torch.device) -> Callable[[], None]:
    wait: Callable[[], None] = torch.get_device_module(device).synchronize
    return wait
