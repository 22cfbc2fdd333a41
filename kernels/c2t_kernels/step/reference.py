"""One draft step of chain mode whose number is on the device, with what vLLM's adaptive verification goes by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from c2t_kernels.checks import INTEGERS, check_tensor, output
from c2t_kernels.network import PathSums, ScoringNetwork, children, confidence_of, finite
from c2t_kernels.score.state import ChainState, check_chain
from c2t_kernels.stats import DraftStats

# no logit is of a chance that is nearer to 0 or 1
NEAREST = 1e-4
# no quotient of confidences is by less
TINY = torch.finfo(torch.float32).tiny


class StepState(NamedTuple):
    """What a draft keeps between its steps, as ChainState; score_step writes it in place, and step 0 starts it anew.

    lowest: (rows,) float32, the smallest confidence so far. unknown: (1,) int64, tokens without one, never reset here.
    """

    joint_log_prob: Tensor
    path_entropy: Tensor
    confidence: Tensor
    lowest: Tensor
    unknown: Tensor

    @classmethod
    def create(cls, rows: int, d_max: int, device: torch.device | str, unknown: Tensor | None = None) -> StepState:
        """State for `rows` requests and drafts of up to d_max tokens. unknown: None: a counter of its own."""
        counter = torch.zeros(1, dtype=torch.int64, device=device) if unknown is None else unknown
        return cls(*ChainState.create(rows, d_max, device), torch.ones(rows, device=device), counter)


class Meaning(NamedTuple):
    """What the chances of tokens turn out to mean: sigmoid(slope * logit c + offset of the step).

    slope: (1,) float32. offsets: (columns or more,) float32. logits, foretold: (slots, columns or more) float32. At a
    row's slot and `step` they get logit c, of a chance no nearer to 0 or 1 than NEAREST, and what was foretold.
    """

    slope: Tensor
    offsets: Tensor
    logits: Tensor
    foretold: Tensor


def check_step(
    state: StepState,
    network: ScoringNetwork,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    step: Tensor,
    slots: Tensor,
    beta: Tensor,
    max_depth: Tensor,
    chances: Tensor,
    stats: Tensor | None = None,
    meaning: Meaning | None = None,
) -> None:
    """Raise unless these are arguments of score_step; what tensors hold cannot be checked without waiting for it."""
    check_chain(ChainState(*state[:3]), network, log_prob, entropy, margin, 1)
    (rows,), device, columns = log_prob.shape, log_prob.device, state.confidence.shape[1]
    output("score_step: state.lowest", state.lowest, state.joint_log_prob.shape, torch.float32, device)
    output("score_step: state.unknown", state.unknown, (1,), torch.int64, device)
    check_tensor("score_step: step", step, dtype=torch.int64, device=device)
    if step.numel() != 1:
        raise ValueError(f"score_step: step must have one element, got shape {tuple(step.shape)}")
    check_tensor("score_step: slots", slots, dtype=INTEGERS, shape=(rows,), device=device)
    check_tensor("score_step: beta", beta, dtype=torch.float32, shape=(1,), device=device)
    check_tensor("score_step: max_depth", max_depth, dtype=torch.int32, shape=(1,), device=device)
    check_tensor("score_step: chances", chances, dtype=torch.float32, shape=(None, None), device=device)
    if chances.shape[0] < rows or chances.shape[1] < columns:
        raise ValueError(f"score_step: chances must hold {rows} rows of {columns}, got shape {tuple(chances.shape)}")
    if stats is not None:
        output("score_step: stats", stats, (max(rows, len(stats)), columns, 4), torch.float32, device)
    if meaning is not None:
        _check_meaning(meaning, columns, device)


def _check_meaning(meaning: Meaning, columns: int, device: torch.device) -> None:
    check_tensor("score_step: meaning.slope", meaning.slope, dtype=torch.float32, shape=(1,), device=device)
    check_tensor("score_step: meaning.offsets", meaning.offsets, dtype=torch.float32, shape=(None,), device=device)
    slots = len(meaning.logits)
    for name in ("logits", "foretold"):
        each = getattr(meaning, name)
        check_tensor(f"score_step: meaning.{name}", each, dtype=torch.float32, shape=(slots, None), device=device)
    held = min(len(meaning.offsets), meaning.logits.shape[1], meaning.foretold.shape[1])
    if held < columns:
        raise ValueError(f"score_step: meaning must hold {columns} steps, holds {held}")


def score_step(
    state: StepState,
    network: ScoringNetwork,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    step: Tensor,
    slots: Tensor,
    beta: Tensor,
    max_depth: Tensor,
    chances: Tensor,
    stats: Tensor | None = None,
    meaning: Meaning | None = None,
) -> None:
    """c2t_kernels.score_step, which says what it computes, in float32 torch."""
    check_step(state, network, log_prob, entropy, margin, step, slots, beta, max_depth, chances, stats, meaning)
    rows, first, column = log_prob.shape[0], step == 0, step.reshape(1)
    above = PathSums(*(torch.where(first, 0.0, part[:rows]) for part in (state.joint_log_prob, state.path_entropy)))
    # a chain's token is the only child of the one before it
    own = DraftStats(torch.zeros_like(log_prob, dtype=torch.int64)[:, None], log_prob[:, None], entropy, margin)
    known = finite(own)
    node = children(above, own, step + 1, known=known)
    state.joint_log_prob[:rows], state.path_entropy[:rows] = node.joint_log_prob[:, 0], node.path_entropy[:, 0]
    confidence = torch.where(known, confidence_of(network, node), torch.nan)
    state.confidence[:rows].index_copy_(1, column, confidence)
    state.unknown.add_((~known[:, 0] & (slots >= 0)).sum())
    lowest = torch.where(first, 1.0, state.lowest[:rows])
    # fmin leaves the minimum as it is where the confidence is not known
    state.lowest[:rows] = torch.fmin(lowest, confidence[:, 0])
    chance = state.lowest[:rows] / lowest.clamp_min(TINY)
    if meaning is not None:
        chance = _foretold(meaning, chance, column, slots.long())
    dropped = (confidence[:, 0] < beta) | (step >= max_depth)
    chances[:rows].index_copy_(1, column, torch.where(dropped, 0.0, chance)[:, None])
    if stats is not None:
        stacked = torch.stack((state.joint_log_prob[:rows], log_prob, entropy, margin), dim=-1)
        stats[:rows].index_copy_(1, column, stacked[:, None])


def _foretold(meaning: Meaning, chance: Tensor, column: Tensor, slots: Tensor) -> Tensor:
    """(rows,) what these chances mean, which is noted for the rows that are requests."""
    logits = torch.logit(chance, eps=NEAREST)
    found = torch.sigmoid(meaning.slope * logits + meaning.offsets[column])
    requests = slots >= 0
    for kept, each in ((meaning.logits, logits), (meaning.foretold, found)):
        kept[slots[requests], column] = each[requests]
    return found
