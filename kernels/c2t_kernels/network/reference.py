"""The classifier as the kernels take it, for chains and trees alike: features in, one confidence out (C2T 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from c2t_kernels.checks import check_int, check_tensor
from c2t_kernels.network.features import FEATURES, NodeStats, counted_features

MAX_HIDDEN = 64
WEIGHTS = ("shift", "scale", "hidden_weight", "hidden_bias", "out_weight", "out_bias")


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

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Have these parameters, in the buffers that captured graphs read. parameters: of the shapes of hidden_weight,
        hidden_bias, out_weight and out_bias; so few bytes that the host waits for no device."""
        mine = (self.hidden_weight, self.hidden_bias, self.out_weight, self.out_bias)
        for buffer, value in zip(mine, parameters, strict=True):
            buffer.copy_(value, non_blocking=True)

    def weights(self) -> dict[str, Tensor]:
        """All tensors by name, in the order in which the kernels take them."""
        return {name: getattr(self, name) for name in WEIGHTS}


def logit_of(
    features: Tensor,
    *,
    shift: Tensor,
    scale: Tensor,
    hidden_weight: Tensor,
    hidden_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
) -> Tensor:
    """The network's forward pass, for serving and training alike: (..., n_features) unscaled -> (...) logits."""
    hidden = torch.relu(linear((features - shift) / scale, hidden_weight, hidden_bias))
    return linear(hidden, out_weight[None], out_bias).squeeze(-1)


def confidence_of(network: ScoringNetwork, stats: NodeStats) -> Tensor:
    """Confidence of every draft token: stats of (...) -> (...) float32 in [0, 1].

    Where the statistics are not finite the result has no meaning.
    """
    features = counted_features(network.features, stats, network.depth_origin)
    return torch.sigmoid(logit_of(features, **network.weights()))
