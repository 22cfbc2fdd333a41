"""What `score_chain` writes to, and what it takes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from c2t_kernels.checks import check_int, check_tensor
from c2t_kernels.network import ScoringNetwork


class ChainState(NamedTuple):
    """What a draft keeps between its steps; score_chain writes it in place, and depth 1 starts it anew.

    joint_log_prob: (rows,) float32, natural log of the product of draft probabilities so far.
    path_entropy: (rows,) float32, nats, sum of the entropies so far.
    confidence: (rows, d_max) float32, column d - 1 of the token at depth d; NaN without finite statistics.
    """

    joint_log_prob: Tensor
    path_entropy: Tensor
    confidence: Tensor

    @classmethod
    def create(cls, rows: int, d_max: int, device: torch.device | str) -> ChainState:
        """State for `rows` requests and drafts of up to d_max tokens."""
        return cls(
            joint_log_prob=torch.zeros(rows, dtype=torch.float32, device=device),
            path_entropy=torch.zeros(rows, dtype=torch.float32, device=device),
            confidence=torch.full((rows, d_max), math.nan, dtype=torch.float32, device=device),
        )


def check_chain(
    state: ChainState, network: ScoringNetwork, log_prob: Tensor, entropy: Tensor, margin: Tensor, depth: int
) -> None:
    """Raise unless these are arguments of score_chain."""
    check_tensor("score_chain: log_prob", log_prob, dtype=torch.float32, shape=(None,), contiguous_last=False)
    rows, device = log_prob.shape[0], log_prob.device
    for name, value in (("entropy", entropy), ("margin", margin)):
        check_tensor(
            f"score_chain: {name}", value, dtype=torch.float32, shape=(rows,), device=device, contiguous_last=False
        )
    for name, sums in (("joint_log_prob", state.joint_log_prob), ("path_entropy", state.path_entropy)):
        check_tensor(f"score_chain: state.{name}", sums, dtype=torch.float32, shape=(None,), device=device)
        if sums.shape[0] < rows:
            raise ValueError(f"score_chain: state.{name} holds {sums.shape[0]} rows, got {rows}")
    confidence = state.confidence
    check_tensor("score_chain: state.confidence", confidence, dtype=torch.float32, shape=(None, None), device=device)
    if confidence.shape[0] < rows:
        raise ValueError(f"score_chain: state.confidence holds {confidence.shape[0]} rows, got {rows}")
    check_int("score_chain: depth", depth, 1, confidence.shape[1])
    check_tensor("score_chain: network.shift", network.shift, device=device)
