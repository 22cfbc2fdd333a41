"""score_chain in one launch: one draft step for a batch, the classifier's hidden layer in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.configuration import Configuration
from c2t_kernels.network.kernel import feature, feature_codes
from c2t_kernels.network.reference import FEATURES, ScoringNetwork
from c2t_kernels.score.reference import ChainState, check_chain

ROWS = 32  # requests of one program: with 64 hidden units 8 numbers per thread
NUM_WARPS = 8

_INFINITY = tl.constexpr(float("inf"))


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
    hidden,
    CODES: tl.constexpr,
    N_FEATURES: tl.constexpr,
    HIDDEN_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b_row32 = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_live = b_row32 < rows
    b_row = b_row32.to(tl.int64)
    b_log_prob = tl.load(p_log_prob + b_row * log_prob_stride, mask=b_live, other=0.0)
    b_entropy = tl.load(p_entropy + b_row * entropy_stride, mask=b_live, other=0.0)
    b_margin = tl.load(p_margin + b_row * margin_stride, mask=b_live, other=0.0)
    # a comparison with NaN is False
    b_finite = (tl.abs(b_log_prob) < _INFINITY) & (tl.abs(b_entropy) < _INFINITY)
    b_later = b_live & (depth > 1)
    b_joint = tl.load(p_joint + b_row, mask=b_later, other=0.0) + tl.where(b_finite, b_log_prob, 0.0)
    b_path = tl.load(p_path_entropy + b_row, mask=b_later, other=0.0) + tl.where(b_finite, b_entropy, 0.0)

    b_unit = tl.arange(0, HIDDEN_PAD)
    b_used = b_unit < hidden
    b_bias = tl.load(p_hidden_bias + b_unit, mask=b_used, other=0.0)
    b_hidden = tl.zeros((BLOCK, HIDDEN_PAD), tl.float32) + b_bias[None, :]
    b_rank = tl.zeros_like(b_joint)
    depth_value = depth + depth_origin - 1
    for i in tl.static_range(N_FEATURES):
        b_value = feature(
            (CODES >> (4 * i)) & 15, b_joint, b_log_prob, b_entropy, b_margin, b_path, b_rank, depth_value
        )
        b_scaled = (b_value - tl.load(p_shift + i)) / tl.load(p_scale + i)
        b_weight = tl.load(p_hidden_weight + b_unit * N_FEATURES + i, mask=b_used, other=0.0)
        b_hidden += b_scaled[:, None] * b_weight[None, :]
    b_out = tl.load(p_out_weight + b_unit, mask=b_used, other=0.0)
    b_logit = tl.sum(tl.maximum(b_hidden, 0.0) * b_out[None, :], axis=1) + tl.load(p_out_bias)
    b_confidence = tl.where(b_finite, 1.0 / (1.0 + tl.exp(-b_logit)), float("nan"))

    tl.store(p_joint + b_row, b_joint, mask=b_live)
    tl.store(p_path_entropy + b_row, b_path, mask=b_live)
    tl.store(p_confidence + b_row * confidence_stride + (depth - 1), b_confidence, mask=b_live)


def score_chain(
    state: ChainState,
    network: ScoringNetwork,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    depth: int,
) -> None:
    """As c2t_kernels.score_chain, in one launch."""
    check_chain(state, network, log_prob, entropy, margin, depth)
    rows = log_prob.shape[0]
    if rows == 0:
        return
    hidden = network.hidden_weight.shape[0]
    score_chain_kernel[(triton.cdiv(rows, ROWS),)](
        log_prob,
        entropy,
        margin,
        state.joint_log_prob,
        state.path_entropy,
        state.confidence,
        network.shift,
        network.scale,
        network.hidden_weight,
        network.hidden_bias,
        network.out_weight,
        network.out_bias,
        rows,
        log_prob.stride(0),
        entropy.stride(0),
        margin.stride(0),
        state.confidence.stride(0),
        depth,
        network.depth_origin,
        hidden,
        CODES=feature_codes(network.features),
        N_FEATURES=len(network.features),
        HIDDEN_PAD=max(16, triton.next_power_of_2(hidden)),
        BLOCK=ROWS,
        num_warps=NUM_WARPS,
    )


def _configuration(features: tuple[str, ...], hidden: int) -> Configuration:
    floats = ("log_prob", "entropy", "margin", "joint", "path_entropy")
    weights = ("shift", "scale", "hidden_weight", "hidden_bias", "out_weight", "out_bias")
    strides = ("log_prob_stride", "entropy_stride", "margin_stride", "confidence_stride")
    return Configuration(
        score_chain_kernel,
        f"score_chain_{len(features)}_features_{hidden}_hidden",
        {
            **{f"p_{name}": "*fp32" for name in floats},
            "p_confidence": "*fp32",
            **{f"p_{name}": "*fp32" for name in weights},
            "rows": "i32",
            **{name: "i32" for name in strides},
            **{name: "i32" for name in ("depth", "depth_origin", "hidden")},
            **{name: "constexpr" for name in ("CODES", "N_FEATURES", "HIDDEN_PAD", "BLOCK")},
        },
        {"CODES": feature_codes(features), "N_FEATURES": len(features), "HIDDEN_PAD": hidden, "BLOCK": ROWS},
        num_warps=NUM_WARPS,
    )


# the paper's classifier and the largest that a file may hold
CONFIGURATIONS = (_configuration(("joint_prob", "entropy", "depth"), 64), _configuration(FEATURES, 64))
