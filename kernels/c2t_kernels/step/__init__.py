"""One draft step of chain mode whose number is on the device, with what vLLM's adaptive verification goes by."""

from __future__ import annotations

from torch import Tensor

from c2t_kernels.network import ScoringNetwork
from c2t_kernels.step import reference
from c2t_kernels.step.reference import Meaning, StepState

__all__ = ["Meaning", "StepState", "score_step"]


def score_step(
    state: StepState,
    network: ScoringNetwork,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    step: Tensor,
    slots: Tensor,
    beta: Tensor,
    max_depth: Tensor,
    chances: Tensor,
    stats: Tensor | None = None,
    meaning: Meaning | None = None,
) -> None:
    """As score_chain, for a CUDA graph of one step that is replayed for all of them: no number of Python is in it.

    network, log_prob, entropy, margin: see score_chain. The state of the first `rows` requests is written in place.
    step: one int64 element, 0 for the first token of a draft, less than the columns of `state.confidence`.
    slots: (rows,) int32 or int64, negative for rows that only pad a captured batch; these count for nothing.
    beta, max_depth: (1,) float32 and (1,) int32, the threshold and the longest chain.
    chances: (rows or more, columns or more) float32. Written in column `step`: c_d = C_d / C_{d-1}, with C the running
        minimum of the confidences from 1 on, so that the product of the columns is C_d. 0 for a token below beta or
        deeper than max_depth; equality keeps.
    stats: (rows or more, columns, 4) float32, contiguous. Written at `step`: each chain's joint log probability and the
        token's log_prob, entropy and margin.
    meaning: what is learnt of the chances; column `step` is then what c_d means, and 0 as before.

    A token without finite statistics has confidence NaN, leaves sums and minimum as they are, is kept, and is counted
    in `state.unknown`.

    On a GPU: one launch.
    """
    if log_prob.is_cuda:
        from c2t_kernels.step import kernel

        op = kernel.score_step
    else:
        op = reference.score_step
    op(state, network, log_prob, entropy, margin, step, slots, beta, max_depth, chances, stats, meaning)
