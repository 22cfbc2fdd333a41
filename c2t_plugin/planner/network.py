"""The classifier's network in numpy, where so few numbers need no launches: scores chains, and a planner trains it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.planner.arrays import Array, sigmoid

# Adam's (C2T B.2 has its defaults).
BETAS, EPSILON = (0.9, 0.999), 1e-8


class Network(NamedTuple):
    """Two layers, ReLU (C2T 4.1), float32. hidden_weight: (hidden, features). hidden_bias, out_weight: (hidden,).
    out_bias: (1,)."""

    hidden_weight: Array
    hidden_bias: Array
    out_weight: Array
    out_bias: Array

    @classmethod
    def of(cls, classifier: NodeClassifier) -> Network:
        """A copy of its parameters."""
        parameters = (classifier.hidden.weight, classifier.hidden.bias, classifier.out.weight[0], classifier.out.bias)
        return cls(*(each.detach().float().cpu().numpy().copy() for each in parameters))

    def copy(self) -> Network:
        return Network(*(each.copy() for each in self))

    def confidence(self, scaled: Array) -> Array:
        """(...) float32 in [0, 1] of (..., features) float32 that are shifted and scaled; NaN stays."""
        hidden = np.maximum(scaled @ self.hidden_weight.T + self.hidden_bias, 0.0)
        return sigmoid(hidden @ self.out_weight + self.out_bias[0])

    def gradient(self, scaled: Array, accepted: Array) -> Network:
        """Of the mean cross-entropy in nats. scaled: (tokens, features) float32. accepted: (tokens,) bool."""
        before = scaled @ self.hidden_weight.T + self.hidden_bias
        hidden = np.maximum(before, 0.0)
        error = (sigmoid(hidden @ self.out_weight + self.out_bias[0]) - accepted) / np.float32(len(scaled))
        below = error[:, None] * self.out_weight * (before > 0)
        return Network(below.T @ scaled, below.sum(0), hidden.T @ error, error.sum(keepdims=True))


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) on one network, in place."""

    def __init__(self, network: Network, rate: float) -> None:
        self._rate, self._steps = rate, 0
        self._moments = [(np.zeros_like(each), np.zeros_like(each)) for each in network]

    def step(self, network: Network, gradient: Network) -> None:
        """One step down the gradient."""
        self._steps += 1
        first, second = (1.0 - beta**self._steps for beta in BETAS)
        for value, slope, (mean, square) in zip(network, gradient, self._moments, strict=True):
            mean += (1.0 - BETAS[0]) * (slope - mean)
            square += (1.0 - BETAS[1]) * (slope * slope - square)
            value -= np.float32(self._rate) * (mean / first) / (np.sqrt(square / second) + np.float32(EPSILON))
