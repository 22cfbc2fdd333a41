"""Numerical operations of C2T: a Triton kernel for tensors on a GPU, its plain torch reference for all others."""

from __future__ import annotations

from torch import Tensor

from c2t_kernels import reference
from c2t_kernels.reference import ChainState, DraftStats, ScoringNetwork

__all__ = ["ChainState", "DraftStats", "ScoringNetwork", "draft_stats", "score_chain"]

# Triton is imported where a tensor on a GPU arrives, so that nothing else needs it.


def draft_stats(logits: Tensor, top_m: int | Tensor, k: int = 1) -> DraftStats:
    """Entropy, most probable tokens and margin of each row's softmax: see c2t_kernels.reference.stats.draft_stats.

    Buffers of one's own and a workspace that outlives the call: c2t_kernels.fused.stats.draft_stats.
    """
    if logits.is_cuda:
        from c2t_kernels.fused import stats

        return stats.draft_stats(logits, top_m, k)
    return reference.draft_stats(logits, top_m, k)


def score_chain(
    state: ChainState,
    network: ScoringNetwork,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    beta: Tensor,
    depth: int,
) -> None:
    """One draft step of chain mode for a batch, in place: see c2t_kernels.reference.chain.score_chain."""
    if log_prob.is_cuda:
        from c2t_kernels.fused import chain

        return chain.score_chain(state, network, log_prob, entropy, margin, beta, depth)
    return reference.score_chain(state, network, log_prob, entropy, margin, beta, depth)
