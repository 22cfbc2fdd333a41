"""C2T's planner over trees where each step's width and depth are its choice, as servers on a CPU have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.simulation.steps import Taken
from c2t_plugin.planner import CostCurve, draft_passes, spend
from c2t_plugin.planner.shapes import Shape, Shapes


class Drafts(NamedTuple):
    """What is drafted in one shape. chances, accepted: (states, tokens), what it is told of each state's draft tokens,
    and which of them the target accepts, both from the surest on."""

    chances: Tensor
    accepted: Tensor


class ShapedTrees:
    """The steps of one server."""

    def __init__(self, drafts: Mapping[Shape, Drafts], curves: Mapping[int, CostCurve]) -> None:
        """drafts: of chains and of trees of one width, of every depth from 1 on. curves: by width, what steps cost. It
        decides by that of chains, whose draft it reads by rows, as a server's that has measured both."""
        self._drafts, self._curves = drafts, curves
        width, depth = max(drafts)
        self._shapes = Shapes(width, depth)
        self._hits = {shape: F.pad(each.accepted.int().cumsum(1), (1, 0)) for shape, each in drafts.items()}
        # steps by shape
        self.taken: dict[Shape, int] = {}

    def __call__(self, at: Tensor) -> Taken:
        """One step of the requests at these states, (requests,) int64."""
        shape = self._shapes.choose(self._curves[1], len(at))
        self.taken[shape] = self.taken.get(shape, 0) + 1
        curve, passes = self._curves[shape.width], draft_passes(shape.depth)
        kept = spend(self._drafts[shape].chances[at], curve, passes).kept
        chains = self._by_layers(1, shape.depth, at)
        if shape.width == 1:
            self._shapes.observe(1, chains.numpy())
        else:
            self._shapes.observe(shape.width, self._by_layers(*shape, at).numpy(), chains.numpy())
        seconds = passes * curve.draft_s(len(at)) + curve.draft_extend + curve.fixed
        seconds += float(curve.verify_s(torch.tensor(len(at) + int(kept.sum()))))
        return Taken(kept, self._hits[shape][at, kept], seconds)

    def _by_layers(self, width: int, depth: int, at: Tensor) -> Tensor:
        """See Shapes.observe."""
        nodes = self._drafts[Shape(width, self._shapes.whole.depth)].chances.shape[1]
        rows = [self._drafts[Shape(width, layers)].chances[at] for layers in range(1, depth + 1)]
        return torch.stack([F.pad(row, (0, nodes - row.shape[1])) for row in rows], dim=1).double().clamp(0.0, 1.0)
