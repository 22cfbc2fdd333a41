"""One draft step of chain mode: joint probability and confidence of every request (C2T 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_kernels.network import PathSums, ScoringNetwork, children, confidence_of, finite
from c2t_kernels.score.state import ChainState, check_chain
from c2t_kernels.stats import DraftStats


def score_chain(
    state: ChainState,
    network: ScoringNetwork,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    depth: int,
) -> None:
    """c2t_kernels.score_chain, which says what it computes, in float32 torch."""
    check_chain(state, network, log_prob, entropy, margin, depth)
    rows = log_prob.shape[0]
    if depth == 1:
        state.joint_log_prob[:rows].zero_()
        state.path_entropy[:rows].zero_()
    # a chain's token is the only child of the one before it
    stats = DraftStats(torch.zeros_like(log_prob, dtype=torch.int64)[:, None], log_prob[:, None], entropy, margin)
    known = finite(stats)
    node = children(PathSums(state.joint_log_prob[:rows], state.path_entropy[:rows]), stats, depth, known=known)
    state.joint_log_prob[:rows], state.path_entropy[:rows] = node.joint_log_prob[:, 0], node.path_entropy[:, 0]
    confidence = torch.where(known, confidence_of(network, node), torch.nan)
    state.confidence[:rows, depth - 1] = confidence[:, 0]
