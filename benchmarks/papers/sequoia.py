"""Sequoia's trees: the shape that is best for measured acceptance by rank, by dynamic programme (Chen et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.policies.static import RankPath, StaticTree


@dataclass(frozen=True, kw_only=True)
class Sequoia(StaticTree):
    """A static tree that `plan_paths` made (Sequoia 3.1); with a temperature, siblings are drawn without replacement,
    as Sequoia draws them (3.2)."""

    @classmethod
    def plan(cls, acceptance: Sequence[float], max_nodes: int, d_max: int, temperature: float = 0.0) -> Sequoia:
        """The best tree for an acceptance vector; see plan_paths."""
        return cls(paths=plan_paths(acceptance, max_nodes, d_max), temperature=temperature)


def plan_paths(acceptance: Sequence[float], max_nodes: int, d_max: int) -> tuple[RankPath, ...]:
    """The tree of at most max_nodes draft nodes and depth d_max with the highest expected accept length.

    acceptance: probability, by rank, that a child is accepted if its parent is; its length limits the branches.
    A child of one rank is there only if those of the ranks before are, as draws without replacement need. Of trees that
    are equally good the one whose first children have the most below them is returned, breadth first.
    Raises ConfigError for probabilities outside [0, 1], a sum above 1, or limits below 1.
    """
    rates = torch.as_tensor(acceptance, dtype=torch.float64)
    if rates.dim() != 1 or not len(rates) or not ((rates >= 0) & (rates <= 1)).all() or rates.sum() > 1 + 1e-6:
        raise ConfigError(f"Sequoia: acceptance by rank must be probabilities of sum at most 1, got {list(acceptance)}")
    if max_nodes < 1 or d_max < 1:
        raise ConfigError(f"Sequoia: max_nodes and d_max must be at least 1, got {max_nodes} and {d_max}")
    d_max = min(d_max, max_nodes)
    choices = _programme(rates, max_nodes, d_max)
    paths: list[RankPath] = []
    waiting: list[tuple[RankPath, int, int]] = [((), max_nodes, d_max)]
    while waiting:
        path, below, layers = waiting.pop()
        for rank in range(len(rates)):
            size = int(choices[layers][rank, below]) if layers and below else 0
            if not size:
                break
            paths.append((*path, rank))
            waiting.append(((*path, rank), size - 1, layers - 1))
            below -= size
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _programme(rates: Tensor, max_nodes: int, d_max: int) -> list[Tensor]:
    """Per number of layers the size of the subtree to give to the child of each rank: (ranks, 1 + nodes) int64.

    rest[r, n] is the best that the children of rank r and later can bring with n nodes among them and their
    descendants; the child of rank r takes m of these, itself included, and brings rates[r] * (1 + below[m - 1]).
    """
    ranks, sizes = len(rates), torch.arange(max_nodes + 1)
    below = torch.zeros(max_nodes + 1, dtype=torch.float64)
    choices = [torch.zeros(ranks, max_nodes + 1, dtype=torch.int64)]
    # [n, m]: whether m of n nodes are a choice. A child without nodes ends the siblings: ranks are used in order
    possible = (sizes >= 1) & (sizes <= sizes[:, None])
    left = (sizes[:, None] - sizes).clamp_min(0)
    for _ in range(d_max):
        rest = torch.zeros(ranks + 1, max_nodes + 1, dtype=torch.float64)
        choice = torch.zeros(ranks, max_nodes + 1, dtype=torch.int64)
        for rank in reversed(range(ranks)):
            own = rates[rank] * (1 + torch.cat([below[:1], below[:-1]]))
            total = torch.where(possible, own + rest[rank + 1][left], 0.0)
            rest[rank] = total.amax(1)
            # the largest of equal choices; none where nothing is to be had
            best = (total == rest[rank][:, None]) * sizes
            choice[rank] = best.amax(1) * (rest[rank] > 0)
        choices.append(choice)
        below = rest[0]
    return choices
