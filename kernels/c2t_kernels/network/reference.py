"""The classifier as the kernels take it, for chains and trees alike: features in, one confidence out (C2T 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from c2t_kernels.checks import check_int, check_tensor

# A feature's code is its place here; the core's list of what a classifier file may name has the same order.
FEATURES = ("joint_prob", "joint_log_prob", "entropy", "depth", "prob", "log_prob", "rank", "margin", "path_entropy")
MIN_LOG_PROB = -50.0
MAX_HIDDEN = 64


@dataclass(frozen=True)
class ScoringNetwork:
    """Two layers, ReLU, sigmoid; every tensor float32, contiguous, on one device.

    features: names from FEATURES; feature i enters as (value - shift[i]) / scale[i].
    shift, scale: (n_features,). hidden_weight: (hidden, n_features), hidden <= 64. hidden_bias, out_weight: (hidden,).
    out_bias: (1,). depth_origin: the number that a root's child has as its depth, 0 or 1.
    """

    features: tuple[str, ...]
    shift: Tensor
    scale: Tensor
    hidden_weight: Tensor
    hidden_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    depth_origin: int

    def __post_init__(self) -> None:
        unknown = [name for name in self.features if name not in FEATURES]
        if unknown or not self.features or len(set(self.features)) != len(self.features):
            raise ValueError(f"ScoringNetwork: features {self.features} must be of {FEATURES}, each at most once")
        check_int("ScoringNetwork: depth_origin", self.depth_origin, 0, 1)
        check_tensor("ScoringNetwork: hidden_weight", self.hidden_weight, shape=(None, len(self.features)))
        hidden, n_features = self.hidden_weight.shape
        check_int("ScoringNetwork: hidden", hidden, 1, MAX_HIDDEN)
        shapes = {
            "shift": (n_features,),
            "scale": (n_features,),
            "hidden_weight": (hidden, n_features),
            "hidden_bias": (hidden,),
            "out_weight": (hidden,),
            "out_bias": (1,),
        }
        for name, shape in shapes.items():
            value = getattr(self, name)
            check_tensor(f"ScoringNetwork: {name}", value, dtype=torch.float32, shape=shape, device=self.shift.device)
            if not value.is_contiguous():
                raise ValueError(f"ScoringNetwork: {name} must be contiguous, got strides {value.stride()}")


def confidence_of(
    network: ScoringNetwork,
    *,
    joint_log_prob: Tensor,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    path_entropy: Tensor,
    rank: Tensor,
    depth: int,
) -> Tensor:
    """Confidence of every draft token, tensors of one shape -> float32 in [0, 1] of that shape.

    joint_log_prob: of the token and all above it. path_entropy: nats, sum of the entropies of its distribution and of
    all above it. rank: among its siblings, 0 the most probable. depth: 1 for a root's child. Where the statistics are
    not finite the result has no meaning.
    """
    values = {
        "joint_prob": joint_log_prob.exp(),
        "joint_log_prob": joint_log_prob.clamp_min(MIN_LOG_PROB),
        "entropy": entropy,
        "depth": torch.full_like(joint_log_prob, depth + network.depth_origin - 1),
        "prob": log_prob.exp(),
        "log_prob": log_prob.clamp_min(MIN_LOG_PROB),
        "rank": rank,
        "margin": margin.clamp_max(-MIN_LOG_PROB),
        "path_entropy": path_entropy,
    }
    features = torch.stack([values[name] for name in network.features], dim=-1)
    scaled = (features - network.shift) / network.scale
    hidden = torch.relu(scaled @ network.hidden_weight.T + network.hidden_bias)
    return torch.sigmoid(hidden @ network.out_weight + network.out_bias)
