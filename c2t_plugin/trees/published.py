"""Constants of published tree policies that serving needs too; the lab's presets take them from here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RankPath = tuple[int, ...]

# EAGLE-1's 25 drafts: v1 appendix A gives the number only. The shape is that of the EAGLE-1 paper's appendix A as its
# authors' code has it (SafeAILab/EAGLE, model/choices.py at e98fc7c, "mc_sim_7b_63"). Ranks from the root, by layer.
EAGLE1_PATHS: tuple[RankPath, ...] = (
    *((rank,) for rank in range(4)),
    *((0, rank) for rank in range(3)),
    *((1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, rank) for rank in range(3)),
    *((0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, rank) for rank in range(3)),
    *((0, 0, 0, 0, rank) for rank in range(2)),
)
# What policy static needs: the children of a node that has the most, which are also the most of a layer that grow.
EAGLE1_WIDTH = 1 + max(path[-1] for path in EAGLE1_PATHS)
EAGLE1_DEPTH = max(map(len, EAGLE1_PATHS))


@dataclass(frozen=True)
class EntropyWidth:
    """B(H) of entropy-shaped trees (Gunjur and Waitz, section 4): how many children a node gets, H in nats the entropy
    of what follows it.

    B is 1 below `sure`, 2 from there to `unsure`, then min(ceil(factor * H), widest).
    """

    sure: float = 0.02
    unsure: float = 1.0
    factor: float = 4.0
    widest: int = 7

    def of(self, entropy: Tensor) -> Tensor:
        """B(H): (...) float32 nats -> (...) int64."""
        many = (entropy * self.factor).ceil().clamp(max=self.widest)
        few = torch.where(entropy < self.sure, 1, 2)
        # NaN, which has no children anyway, counts as certain
        return torch.where(entropy >= self.unsure, many.nan_to_num(1.0).long(), few)
