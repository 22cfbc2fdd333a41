"""One layer of a C2T tree: score the frontier's children, prune them, choose the next frontier (C2T algorithm 1)."""

from __future__ import annotations

from torch import Tensor

from c2t_kernels.growth import reference
from c2t_kernels.growth.reference import GrownLayer, select_children
from c2t_kernels.network import ScoringNetwork
from c2t_kernels.stats import DraftStats

__all__ = ["GrownLayer", "grow_layer", "select_children"]


def grow_layer(
    network: ScoringNetwork,
    joint_log_prob: Tensor,
    path_entropy: Tensor,
    alive: Tensor,
    stats: DraftStats,
    beta: Tensor | float,
    depth: int,
    *,
    width: int,
) -> GrownLayer:
    """Grow one layer of a batch of trees.

    network: the classifier, on the tensors' device.
    joint_log_prob: (bs, slots) float32 of the frontier; 0 for a root. alive: (bs, slots) bool.
    path_entropy: (bs, slots) float32, nats, sum of the entropies of the distributions that the frontier's node and all
        above it were drawn from; 0 for a root.
    stats: draft_stats of the frontier's logits, bs * slots rows; its k tokens are the children (the first topK).
    beta: one number, or (bs,) float32: a child below it is cut; equality keeps, and so does an unknown confidence.
    depth: of the children, 1 below the root.
    width: places of the next frontier.

    Of equal confidences the lower column is better; an unknown one is better than all. A token of probability 0 is no
    child. The probability of an unscored child counts as 1, its entropy as 0.
    Raises ValueError or TypeError for a Python number beta that is not in [0, 1].

    On a GPU: one launch. A number for beta is one more launch, which fills a tensor with it.
    """
    if joint_log_prob.is_cuda:
        from c2t_kernels.growth import kernel

        return kernel.grow_layer(network, joint_log_prob, path_entropy, alive, stats, beta, depth, width=width)
    return reference.grow_layer(network, joint_log_prob, path_entropy, alive, stats, beta, depth, width=width)
