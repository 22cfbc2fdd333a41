"""What the classifier may look at: properties of a node of the token tree, never of a model (C2T 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# exp(-50) is far below what float32 softmax resolves; a draft word of probability 0 gets this instead of -inf.
MIN_LOG_PROB = -50.0


class NodeStats(NamedTuple):
    """Per node, all of one shape, float32.

    joint_log_prob: natural log of the product of draft probabilities from the root (C2T equation 1).
    log_prob: natural log of the node's own probability.
    entropy: nats, of the distribution the node was drawn from (C2T equation 3; algorithm 1 line 11: the parent's).
    depth: edges from the root, 1 for a root's child.
    rank: place among its siblings by probability, 0 the most probable.
    margin: difference of the two largest log probabilities of the distribution the node was drawn from.
    path_entropy: nats, sum of the entropies on the way: of the root's distribution and all down to the node's own one.
    """

    joint_log_prob: Tensor
    log_prob: Tensor
    entropy: Tensor
    depth: Tensor
    rank: Tensor
    margin: Tensor
    path_entropy: Tensor


FEATURES = ("joint_prob", "joint_log_prob", "entropy", "depth", "prob", "log_prob", "rank", "margin", "path_entropy")
PAPER_FEATURES = ("joint_prob", "entropy", "depth")
# The paper's three, P as its logarithm, and four more that cost nothing: the draft step has computed them already.
EXTENDED_FEATURES = ("joint_log_prob", "entropy", "depth", "log_prob", "rank", "margin", "path_entropy")


def node_features(names: Sequence[str], stats: NodeStats) -> Tensor:
    """Stack the named features: stats of any shape (...) -> (..., len(names)) float32.

    names: from FEATURES. Raises KeyError for another name, which a loaded classifier cannot hold.
    """
    columns = {
        "joint_prob": lambda: stats.joint_log_prob.exp(),
        "joint_log_prob": lambda: stats.joint_log_prob.clamp_min(MIN_LOG_PROB),
        "entropy": lambda: stats.entropy,
        "depth": lambda: stats.depth,
        "prob": lambda: stats.log_prob.exp(),
        "log_prob": lambda: stats.log_prob.clamp_min(MIN_LOG_PROB),
        "rank": lambda: stats.rank,
        "margin": lambda: stats.margin.clamp_max(-MIN_LOG_PROB),
        "path_entropy": lambda: stats.path_entropy,
    }
    return torch.stack([columns[name]().float() for name in names], dim=-1)
