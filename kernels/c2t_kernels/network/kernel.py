"""What the kernels that score draft tokens share: the features of a network, each named by four bits."""

from __future__ import annotations

import triton
import triton.language as tl

from c2t_kernels.network.reference import FEATURES, MIN_LOG_PROB

_MIN_LOG_PROB = tl.constexpr(MIN_LOG_PROB)


@triton.jit
def feature(CODE: tl.constexpr, b_joint, b_log_prob, b_entropy, b_margin, b_path_entropy, b_rank, depth):
    """The feature whose place in FEATURES is CODE."""
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
    else:
        b_value = b_path_entropy
    return b_value


def feature_codes(features: tuple[str, ...]) -> int:
    """Four bits per feature, the first lowest: its place in FEATURES."""
    return sum(FEATURES.index(name) << (4 * i) for i, name in enumerate(features))
