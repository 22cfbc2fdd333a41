"""What the kernels that score draft tokens share: a node's statistics, its features, the network's forward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from c2t_kernels.network.features import FEATURES, MIN_LOG_PROB

_MIN_LOG_PROB = tl.constexpr(MIN_LOG_PROB)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def node_stats(p_log_probs, b_rank, p_entropy, p_margin, b_joint_above, b_path_above, b_live):
    """What the features are made of, for tokens of any shape: the twin of features.children, with the path's sums.

    p_log_probs: where the log probabilities of each token's distribution begin, the most probable first; b_rank: which
    of them is the token's. b_joint_above, b_path_above: the path's sums before the token.
    Returns the statistics as `feature` takes them, ln P, the sum of entropies and the log probability first, and which
    tokens have finite ones; others add nothing to the sums.
    """
    b_log_prob = tl.load(p_log_probs + b_rank, mask=b_live, other=0.0)
    b_entropy = tl.load(p_entropy, mask=b_live, other=0.0)
    b_margin = tl.load(p_margin, mask=b_live, other=0.0)
    b_leading = tl.load(p_log_probs + tl.zeros_like(b_rank), mask=b_live, other=0.0)
    # a comparison with NaN is False
    b_finite = (tl.abs(b_log_prob) < _INFINITY) & (tl.abs(b_entropy) < _INFINITY)
    b_joint = b_joint_above + tl.where(b_finite, b_log_prob, 0.0)
    b_path = b_path_above + tl.where(b_finite, b_entropy, 0.0)
    return (b_joint, b_path, b_log_prob, b_entropy, b_margin, b_rank.to(tl.float32), b_leading), b_finite


@triton.jit
def feature(CODE: tl.constexpr, b_node, depth):
    """The feature whose place in features.TABLE is CODE."""
    b_joint, b_path, b_log_prob, b_entropy, b_margin, b_rank, b_leading = b_node
    if CODE == 0:
        b_value = tl.exp(b_joint)
    elif CODE == 1:
        b_value = tl.maximum(b_joint, _MIN_LOG_PROB)
    elif CODE == 2:
        b_value = b_entropy
    elif CODE == 3:
        b_value = tl.zeros_like(b_joint) + depth
    elif CODE == 4:
        b_value = tl.exp(b_log_prob)
    elif CODE == 5:
        b_value = tl.maximum(b_log_prob, _MIN_LOG_PROB)
    elif CODE == 6:
        b_value = b_rank
    elif CODE == 7:
        b_value = tl.minimum(b_margin, -_MIN_LOG_PROB)
    elif CODE == 8:
        b_value = b_path
    else:
        b_both = b_leading + tl.log(1.0 + tl.exp(-b_margin))
        b_value = tl.maximum(b_log_prob - b_both, _MIN_LOG_PROB)
    return b_value


@triton.jit
def confidence(
    b_node,
    depth,
    p_shift,
    p_scale,
    p_hidden_weight,
    p_hidden_bias,
    p_out_weight,
    p_out_bias,
    CODES: tl.constexpr,
    N_FEATURES: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The network's forward pass, BLOCK_H hidden units at a time; depth: as the network counts it."""
    b_zero = tl.zeros_like(b_node[0])
    b_logit = b_zero + tl.load(p_out_bias)
    for first in range(0, HIDDEN, BLOCK_H):
        b_unit = first + tl.arange(0, BLOCK_H)
        b_used = b_unit < HIDDEN
        b_hidden = b_zero[:, None] + tl.load(p_hidden_bias + b_unit, mask=b_used, other=0.0)[None, :]
        for i in tl.static_range(N_FEATURES):
            b_value = feature((CODES >> (4 * i)) & 15, b_node, depth)
            b_value = (b_value - tl.load(p_shift + i)) / tl.load(p_scale + i)
            b_weight = tl.load(p_hidden_weight + b_unit * N_FEATURES + i, mask=b_used, other=0.0)
            b_hidden += b_value[:, None] * b_weight[None, :]
        b_weight = tl.load(p_out_weight + b_unit, mask=b_used, other=0.0)
        b_logit += tl.sum(tl.maximum(b_hidden, 0.0) * b_weight[None, :], axis=1)
    return 1.0 / (1.0 + tl.exp(-b_logit))


def feature_codes(features: tuple[str, ...]) -> int:
    """Four bits per feature, the first lowest: its place in features.TABLE."""
    return sum(FEATURES.index(name) << (4 * i) for i, name in enumerate(features))


def constants_of(features: tuple[str, ...], hidden: int) -> dict[str, int]:
    """What `confidence` is compiled for, its block of hidden units left out."""
    return {"CODES": feature_codes(features), "N_FEATURES": len(features), "HIDDEN": hidden}
