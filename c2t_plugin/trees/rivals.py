"""Rules of other papers that only their own servers load: entropy-shaped trees, and EAGLE-1's static tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from c2t_kernels import DraftStats, GrownLayer
from c2t_plugin.trees.policies import Children, Frontier
from c2t_plugin.trees.published import EAGLE1_PATHS, EntropyWidth, RankPath


@dataclass(frozen=True)
class EntropySlots:
    """As many children as the entropy asks for, and `width` of them at most (entropy-shaped trees, section 4)."""

    cuts: ClassVar[bool] = False
    width: int
    rule: EntropyWidth

    def layer(self, frontier: Frontier, stats: DraftStats, beta: Tensor, depth: int) -> GrownLayer:
        children = Children.of(frontier, stats)
        wanted = self.rule.of(stats.entropy.reshape(frontier.alive.shape))[..., None]
        rank = torch.arange(stats.log_probs.shape[1], device=wanted.device)
        kept = children.possible & (rank < wanted).flatten(1)
        return children.grown(children.prob, kept, children.most_probable(kept, self.width))


@dataclass(frozen=True)
class StaticSlots:
    """A tree given by the ranks on the way to each node, EAGLE-1's by default."""

    cuts: ClassVar[bool] = False
    width: int
    device: torch.device | str
    paths: tuple[RankPath, ...] = EAGLE1_PATHS
    _layers: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_layers", list(self._tables()))

    def _tables(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Per depth the places that belong to the tree, (slots * width) bool, and those that grow, (width,) int32."""
        found = []
        parents: list[RankPath] = [()]
        for depth in range(1, max(map(len, self.paths)) + 1):
            places = {p: parents.index(p[:-1]) * self.width + p[-1] for p in self.paths if len(p) == depth}
            kept = torch.zeros((1 if depth == 1 else self.width) * self.width, dtype=torch.bool)
            kept[list(places.values())] = True
            parents = [path for path in places if any(other[:-1] == path for other in self.paths)]
            columns = [places[path] for path in parents] + [-1] * (self.width - len(parents))
            found.append((kept.to(self.device), torch.tensor(columns, dtype=torch.int32, device=self.device)))
        return found

    def layer(self, frontier: Frontier, stats: DraftStats, beta: Tensor, depth: int) -> GrownLayer:
        children = Children.of(frontier, stats)
        if depth > len(self._layers):
            nothing = torch.zeros_like(children.possible)
            return children.grown(children.prob, nothing, children.most_probable(nothing, self.width))
        belongs, grows = self._layers[depth - 1]
        kept = children.possible & belongs
        columns = grows.expand(len(kept), -1)
        live = (columns >= 0) & kept.gather(1, columns.clamp_min(0).long())
        return children.grown(children.prob, kept, torch.where(live, columns, -1))
