"""Scoring networks with random weights, for tests."""

from __future__ import annotations

import torch

from c2t_kernels import ScoringNetwork

PAPER = ("joint_prob", "entropy", "depth")


def random_network(features: tuple[str, ...], hidden: int, device: str, depth_origin: int = 1) -> ScoringNetwork:
    """Random weights, with an output layer that leaves confidences between the extremes, where a beta cuts some."""
    generator = torch.Generator().manual_seed(hidden)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    n = len(features)
    scale = draw(n).abs() + 0.5
    out_weight = draw(hidden) / (4 * hidden)
    return ScoringNetwork(
        features, draw(n), scale, draw(hidden, n), draw(hidden), out_weight, draw(1) / 4, depth_origin
    )
