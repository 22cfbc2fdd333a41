"""One draft step of chain mode: joint probability, confidence and kept length of every request (C2T 4.1 and 5.5)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from c2t_kernels.checks import check_int, check_tensor
from c2t_kernels.reference.network import ScoringNetwork, confidence_of


class ChainState(NamedTuple):
    """What a draft keeps between its steps; score_chain writes it in place, and depth 1 starts it anew.

    joint_log_prob: (rows,) float32, natural log of the product of draft probabilities so far.
    path_entropy: (rows,) float32, nats, sum of the entropies so far.
    alive: (rows,) bool, False from the first token under beta on.
    kept: (rows,) int32, tokens before that one.
    confidence: (rows, d_max) float32, column d - 1 of the token at depth d; NaN without finite statistics.
    non_finite: (1,) int64, counts the tokens without finite statistics; never set back.
    """

    joint_log_prob: Tensor
    path_entropy: Tensor
    alive: Tensor
    kept: Tensor
    confidence: Tensor
    non_finite: Tensor

    @classmethod
    def create(cls, rows: int, d_max: int, device: torch.device | str) -> ChainState:
        """State for `rows` requests and drafts of up to d_max tokens."""
        return cls(
            joint_log_prob=torch.zeros(rows, dtype=torch.float32, device=device),
            path_entropy=torch.zeros(rows, dtype=torch.float32, device=device),
            alive=torch.ones(rows, dtype=torch.bool, device=device),
            kept=torch.zeros(rows, dtype=torch.int32, device=device),
            confidence=torch.full((rows, d_max), math.nan, dtype=torch.float32, device=device),
            non_finite=torch.zeros(1, dtype=torch.int64, device=device),
        )


def check_chain(
    state: ChainState,
    network: ScoringNetwork,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    beta: Tensor,
    depth: int,
) -> None:
    """Raise unless these are arguments of score_chain."""
    check_tensor("score_chain: log_prob", log_prob, dtype=torch.float32, shape=(None,), contiguous_last=False)
    rows, device = log_prob.shape[0], log_prob.device
    for name, value in (("entropy", entropy), ("margin", margin)):
        check_tensor(
            f"score_chain: {name}", value, dtype=torch.float32, shape=(rows,), device=device, contiguous_last=False
        )
    check_tensor("score_chain: beta", beta, dtype=torch.float32, shape=(None,), device=device)
    if beta.shape[0] not in (1, rows):
        raise ValueError(f"score_chain: beta must have 1 entry or one per row ({rows}), got {beta.shape[0]}")
    floats = dict.fromkeys(("joint_log_prob", "path_entropy"), torch.float32)
    for name, dtype in {**floats, "alive": torch.bool, "kept": torch.int32}.items():
        check_tensor(f"score_chain: state.{name}", getattr(state, name), dtype=dtype, shape=(None,), device=device)
        if getattr(state, name).shape[0] < rows:
            raise ValueError(f"score_chain: state.{name} holds {getattr(state, name).shape[0]} rows, got {rows}")
    confidence = state.confidence
    check_tensor("score_chain: state.confidence", confidence, dtype=torch.float32, shape=(None, None), device=device)
    if confidence.shape[0] < rows:
        raise ValueError(f"score_chain: state.confidence holds {confidence.shape[0]} rows, got {rows}")
    check_tensor("score_chain: state.non_finite", state.non_finite, dtype=torch.int64, shape=(1,), device=device)
    check_int("score_chain: depth", depth, 1, confidence.shape[1])
    check_tensor("score_chain: network.shift", network.shift, device=device)


def score_chain(
    state: ChainState,
    network: ScoringNetwork,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    beta: Tensor,
    depth: int,
) -> None:
    """Score the token at `depth` of every chain and write the state of the first `rows` requests in place.

    log_prob, entropy, margin: (rows,) float32 of any stride, draft_stats of the logits that the token is the argmax
        of; a sibling's rank is 0 on a chain.
    beta: (1,) or (rows,) float32 on the device; a token below it ends the chain, equality keeps.
    depth: 1 for the first token of a draft.

    A token whose log_prob or entropy is not finite is kept and counted; its probability counts as 1, its entropy as 0.
    """
    check_chain(state, network, log_prob, entropy, margin, beta, depth)
    rows = log_prob.shape[0]
    if depth == 1:
        state.joint_log_prob[:rows] = 0.0
        state.path_entropy[:rows] = 0.0
        state.alive[:rows] = True
        state.kept[:rows] = 0
    finite = torch.isfinite(log_prob) & torch.isfinite(entropy)
    state.joint_log_prob[:rows] += torch.where(finite, log_prob, 0.0)
    state.path_entropy[:rows] += torch.where(finite, entropy, 0.0)
    joint = state.joint_log_prob[:rows]
    confidence = confidence_of(
        network,
        joint_log_prob=joint,
        log_prob=log_prob,
        entropy=entropy,
        margin=margin,
        path_entropy=state.path_entropy[:rows],
        rank=torch.zeros_like(joint),
        depth=depth,
    )
    confidence = torch.where(finite, confidence, torch.nan)
    state.confidence[:rows, depth - 1] = confidence
    state.alive[:rows] &= ~(confidence < beta)
    state.kept[:rows] += state.alive[:rows].int()
    state.non_finite.add_((~finite).sum())
