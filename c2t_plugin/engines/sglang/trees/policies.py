"""Rules by which a tree grows in fixed slots: every layer has the same shape, so it fits a CUDA graph. No engine here.

A layer are the k most probable children of each node of a frontier (the first top-K). A rule says which of them belong
to the tree and which are drafted from next, at most `width` of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from c2t_kernels import DraftStats, ScoringNetwork, grow_layer
from c2t_kernels.reference import GrownLayer
from c2t_plugin.classifier import NodeClassifier


class SlotPolicy(Protocol):
    """One rule. It keeps no state.

    top_m: how many probabilities the entropy sums over. width: nodes drafted from per layer.
    """

    @property
    def top_m(self) -> int: ...

    @property
    def width(self) -> int: ...

    def layer(self, joint_log_prob: Tensor, alive: Tensor, stats: DraftStats, beta: Tensor, depth: int) -> GrownLayer:
        """Grow one layer: arguments and result as of grow_layer, beta (bs,) float32.

        `confidence` is what the tree's size limit goes by: of too many nodes, those of the lowest are dropped.
        """


@dataclass(frozen=True, eq=False)
class C2TSlots:
    """The paper's: below beta a node is cut, and of the rest the `width` of highest confidence stay (C2T 4.2)."""

    network: ScoringNetwork
    top_m: int
    width: int

    def layer(self, joint_log_prob: Tensor, alive: Tensor, stats: DraftStats, beta: Tensor, depth: int) -> GrownLayer:
        return grow_layer(self.network, joint_log_prob, alive, stats, beta, depth, width=self.width)


def scoring_network(classifier: NodeClassifier, device: torch.device | str) -> ScoringNetwork:
    """The classifier as the kernels take it."""
    spec = classifier.spec

    def ready(weight: Tensor) -> Tensor:
        return weight.detach().float().contiguous().to(device)

    return ScoringNetwork(
        features=spec.features,
        shift=ready(classifier.shift),
        scale=ready(classifier.scale),
        hidden_weight=ready(classifier.hidden.weight),
        hidden_bias=ready(classifier.hidden.bias),
        out_weight=ready(classifier.out.weight.flatten()),
        out_bias=ready(classifier.out.bias),
        depth_origin=spec.depth_origin,
    )
