"""`--speculative-c2t-planner` over trees: what shape they are drafted in, where a step may choose, and what of them is
verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from c2t_plugin.planner import CostCurve, OwnLimits, Planner, draft_passes, spend
from c2t_plugin.planner.budget import best_rows, falling_of
from c2t_plugin.planner.gains import RecentGains
from c2t_plugin.planner.shapes import Shapes
from c2t_plugin.planner.step_costs import StepCosts
from c2t_plugin.planner.step_planner import StepPlanner


class TreePlanner(StepPlanner):
    """One budget of the target's pass for the nodes of all trees; `keep` is told these from the surest on.

    The draft of its cost curve is by rows of a pass, a request's width times requests: a chain's and a tree's are
    points of one line. width: nodes that the step at hand is drafted from per layer.
    """

    def __init__(
        self, curve: CostCurve | None, path: Path | None, *, topk: int, steps: int, most: int, device: torch.device
    ) -> None:
        """topk: the widest. steps, most, device: see StepPlanner."""
        super().__init__(curve, path, steps=steps, most=most, device=device)
        self.width = self._topk = topk
        self._most, self._recent = most, RecentGains()
        self.shapes: Shapes | None = None
        # steps by width
        self.widths: Counter[int] = Counter()

    def wait_for_nothing(self, requests: int, device: torch.device | str) -> None:
        from c2t_plugin.planner.readback import Readback

        self._unread = Readback(device, requests * self._most, torch.float32)

    def _hear(self, planner: Planner, sure: Tensor) -> None:
        self._recent.note(falling_of(sure.double().numpy()))

    def plan_rows(self, requests: int) -> int | None:
        """See StepPlanner. `note` is told how sure each tree's nodes are: (requests, most) float32, falling, 0 behind
        the last one."""
        if self._unread is None:
            return None
        whole = requests * (self._most + 1)
        if self._forced is not None:
            return min(whole, requests * (self._forced + 1))
        if self.curve is None or self._whole or not self._decides:
            return whole
        gains, costs = self._recent.expected(requests, self._most), StepCosts(self.curve.beside)
        if gains is None:
            return whole
        passes, sizes = self._drafting(requests), self.sizes()
        rows, self._promised_s = best_rows(gains, requests, self.curve, passes, sizes, costs, self.depth)
        return rows

    def _drafting(self, requests: int) -> float:
        """Seconds of the step's draft passes."""
        assert self.curve is not None
        return draft_passes(self.depth) * self.curve.draft_s(requests * self.width)

    def vary(self, may: bool) -> None:
        """Whether to choose the shape of each step from now on: its draft may be a chain, and end after any layer."""
        self.shapes = Shapes(self._topk, self._steps) if may else None

    def begin(self, requests: int, whole: bool = False, own: Sequence[OwnLimits | None] = ()) -> int:
        self.width = self._topk
        depth = super().begin(requests, whole, own)
        self.widths[self.width] += 1
        return depth

    def _choose(self, requests: int, before: int | None) -> None:
        super()._choose(requests, before)
        if self.shapes is None:
            return
        if self._forced is not None:
            # what a chain has room for is measured on chains, so that draft passes of both widths are
            self.width = 1 if self._forced <= self._steps else self._topk
        elif self.curve is not None:
            self.width, self.depth = self.shapes.choose(self.curve, requests)

    @contextmanager
    def timed(self, part: str, count: Callable[[], int]) -> Iterator[None]:
        with super().timed(part, (lambda: count() * self.width) if part == "draft" else count):
            yield

    def observe(self, chances: Tensor, chains: Tensor) -> None:
        """Learn what drafts bring, from those of the step at hand. chances: see Shapes.observe. chains: the same of the
        chains that they hold."""
        if self.shapes is not None and self._decides:
            held = chains.double().numpy() if self.width > 1 else None
            self.shapes.observe(self.width, chances.double().numpy(), held)

    def _spent(self, acceptance: Tensor, longest: Tensor, at_least: Tensor) -> Tensor:
        assert self.curve is not None
        costs = StepCosts(self.curve.beside + self._drafting(len(acceptance)))
        return spend(acceptance, self.curve, 0, longest, at_least, self.sizes(), costs).kept

    def state(self) -> dict[str, Any]:
        """Besides, where each step has a width of its own. widths: steps by it."""
        if self.shapes is None:
            return super().state()
        return {**super().state(), "widths": {str(width): self.widths[width] for width in (1, self._topk)}}
