"""score_chain in one launch: one draft step for a batch, the classifier's hidden layer in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.network import ScoringNetwork
from c2t_kernels.network.kernel import confidence, constants_of, node_stats
from c2t_kernels.score.state import ChainState, check_chain

ROWS = 32  # requests of one program: with 64 hidden units 8 numbers per thread
NUM_WARPS = 8


# Every depth is the same kernel.
@triton.jit(do_not_specialize=["depth"])
def score_chain_kernel(
    p_log_prob,
    p_entropy,
    p_margin,
    p_joint,
    p_path_entropy,
    p_confidence,
    p_shift,
    p_scale,
    p_hidden_weight,
    p_hidden_bias,
    p_out_weight,
    p_out_bias,
    rows,
    log_prob_stride,
    entropy_stride,
    margin_stride,
    confidence_stride,
    depth,
    depth_origin,
    CODES: tl.constexpr,
    N_FEATURES: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b_row32 = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_live = b_row32 < rows
    b_row = b_row32.to(tl.int64)
    b_later = b_live & (depth > 1)
    # a chain's token is the most probable one
    b_node, b_finite = node_stats(
        p_log_prob + b_row * log_prob_stride,
        tl.zeros_like(b_row32),
        p_entropy + b_row * entropy_stride,
        p_margin + b_row * margin_stride,
        tl.load(p_joint + b_row, mask=b_later, other=0.0),
        tl.load(p_path_entropy + b_row, mask=b_later, other=0.0),
        b_live,
    )
    b_confidence = confidence(
        b_node,
        depth + depth_origin - 1,
        p_shift,
        p_scale,
        p_hidden_weight,
        p_hidden_bias,
        p_out_weight,
        p_out_bias,
        CODES,
        N_FEATURES,
        HIDDEN,
        BLOCK_H,
    )
    b_confidence = tl.where(b_finite, b_confidence, float("nan"))
    tl.store(p_joint + b_row, b_node[0], mask=b_live)
    tl.store(p_path_entropy + b_row, b_node[1], mask=b_live)
    tl.store(p_confidence + b_row * confidence_stride + (depth - 1), b_confidence, mask=b_live)


def score_chain(
    state: ChainState, network: ScoringNetwork, log_prob: Tensor, entropy: Tensor, margin: Tensor, depth: int
) -> None:
    """As c2t_kernels.score_chain, in one launch."""
    check_chain(state, network, log_prob, entropy, margin, depth)
    rows = log_prob.shape[0]
    if rows == 0:
        return
    score_chain_kernel[(triton.cdiv(rows, ROWS),)](
        *(log_prob, entropy, margin, *state),
        *network.weights().values(),
        rows,
        *(each.stride(0) for each in (log_prob, entropy, margin, state.confidence)),
        depth,
        network.depth_origin,
        **constants(network.features, len(network.hidden_bias)),
        num_warps=NUM_WARPS,
    )


def constants(features: tuple[str, ...], hidden: int) -> dict[str, int]:
    """Constants of a launch."""
    block = max(16, triton.next_power_of_2(hidden))
    # hidden units that are computed at a time: with a logarithm among the features, 64 put 8 bytes on the stack
    units = min(block, 32) if "sibling_log_prob" in features else block
    return {**constants_of(features, hidden), "BLOCK_H": units, "BLOCK": ROWS}
