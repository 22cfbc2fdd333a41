"""The classifier's features of tokens in chains, in numpy; c2t_kernels.network has the definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from c2t_kernels.network import MIN_LOG_PROB, PathSums, extend_path
from c2t_plugin.planner.arrays import Array


class PathNode(NamedTuple):
    """Tokens of chains, float32 of any shape, the same for each; their rank is 0."""

    joint_log_prob: Array
    path_entropy: Array
    log_prob: Array
    entropy: Array
    margin: Array


def extended(path: PathSums[Any], log_prob: Array, entropy: Array) -> tuple[PathSums[Any], Array]:
    """Chains and one token more of each, and (rows,) bool which of these are known: others add nothing."""
    known = np.isfinite(log_prob) & np.isfinite(entropy)
    return extend_path(
        path, np.where(known, log_prob, np.float32(0.0)), np.where(known, entropy, np.float32(0.0))
    ), known


# The twin of c2t_kernels.network.TABLE for a token of rank 0; None: the same for all tokens of a depth.
VALUES: dict[str, Callable[[PathNode], Array] | None] = {
    "joint_prob": lambda node: np.exp(node.joint_log_prob),
    "joint_log_prob": lambda node: np.maximum(node.joint_log_prob, MIN_LOG_PROB),
    "entropy": lambda node: node.entropy,
    "depth": None,
    "prob": lambda node: np.exp(node.log_prob),
    "log_prob": lambda node: np.maximum(node.log_prob, MIN_LOG_PROB),
    "rank": None,
    "margin": lambda node: np.minimum(node.margin, -MIN_LOG_PROB),
    "path_entropy": lambda node: node.path_entropy,
    "sibling_log_prob": lambda node: -np.log1p(np.exp(-node.margin)),
}
