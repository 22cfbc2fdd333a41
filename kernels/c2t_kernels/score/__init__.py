"""One draft step of chain mode: joint probability and confidence of every request (C2T 4.1)."""

from __future__ import annotations

from torch import Tensor

from c2t_kernels.network import ScoringNetwork
from c2t_kernels.score.state import ChainState

__all__ = ["ChainState", "score_chain"]


def score_chain(
    state: ChainState,
    network: ScoringNetwork,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    depth: int,
) -> None:
    """Score the token at `depth` of every chain and write the state of the first `rows` requests in place.

    network: the classifier, on the tensors' device.
    log_prob, entropy, margin: (rows,) float32 of any stride, draft_stats of the logits that the token is the argmax
        of; a sibling's rank is 0 on a chain.
    depth: 1 for the first token of a draft.

    A token whose log_prob or entropy is not finite has confidence NaN; its probability counts as 1, its entropy as 0.
    Where a chain ends is early_stop's to say.

    On a GPU: one launch.
    """
    if log_prob.is_cuda:
        from c2t_kernels.score import kernel

        kernel.score_chain(state, network, log_prob, entropy, margin, depth)
    else:
        from c2t_kernels.score import reference

        reference.score_chain(state, network, log_prob, entropy, margin, depth)
