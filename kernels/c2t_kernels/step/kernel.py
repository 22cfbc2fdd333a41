"""score_step in one launch: one draft step for a batch, the step's number read on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.network import ScoringNetwork
from c2t_kernels.network.kernel import confidence, node_stats
from c2t_kernels.score.kernel import NUM_WARPS, ROWS, constants
from c2t_kernels.step.reference import NEAREST, TINY, Meaning, StepState, check_step

_TINY = tl.constexpr(TINY)
_NEAREST = tl.constexpr(NEAREST)


# Requests are others in each step.
@triton.jit(do_not_specialize=["rows", "depth_origin"])
def score_step_kernel(
    p_log_prob,
    p_entropy,
    p_margin,
    p_joint,
    p_path_entropy,
    p_confidence,
    p_lowest,
    p_unknown,
    p_shift,
    p_scale,
    p_hidden_weight,
    p_hidden_bias,
    p_out_weight,
    p_out_bias,
    p_step,
    p_slots,
    p_beta,
    p_max_depth,
    p_chances,
    p_stats,
    p_slope,
    p_offsets,
    p_logits,
    p_foretold,
    rows,
    log_prob_stride,
    entropy_stride,
    margin_stride,
    confidence_stride,
    chances_stride,
    stats_stride,
    logits_stride,
    foretold_stride,
    depth_origin,
    CODES: tl.constexpr,
    N_FEATURES: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b_row32 = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_live = b_row32 < rows
    b_row = b_row32.to(tl.int64)
    step = tl.load(p_step).to(tl.int32)
    b_later = b_live & (step > 0)
    # a chain's token is the most probable one
    b_node, b_finite = node_stats(
        p_log_prob + b_row * log_prob_stride,
        tl.zeros_like(b_row32),
        p_entropy + b_row * entropy_stride,
        p_margin + b_row * margin_stride,
        tl.load(p_joint + b_row, mask=b_later, other=0.0),
        tl.load(p_path_entropy + b_row, mask=b_later, other=0.0),
        b_live,
    )
    b_confidence = confidence(
        b_node,
        step + depth_origin,
        p_shift,
        p_scale,
        p_hidden_weight,
        p_hidden_bias,
        p_out_weight,
        p_out_bias,
        CODES,
        N_FEATURES,
        HIDDEN,
        BLOCK_H,
    )
    tl.store(p_joint + b_row, b_node[0], mask=b_live)
    tl.store(p_path_entropy + b_row, b_node[1], mask=b_live)
    if p_stats is not None:
        p_own = p_stats + b_row * stats_stride + 4 * step
        tl.store(p_own, b_node[0], mask=b_live)
        tl.store(p_own + 1, b_node[2], mask=b_live)
        tl.store(p_own + 2, b_node[3], mask=b_live)
        tl.store(p_own + 3, b_node[4], mask=b_live)
    b_said = tl.where(b_finite, b_confidence, float("nan"))
    tl.store(p_confidence + b_row * confidence_stride + step, b_said, mask=b_live)
    b_above = tl.load(p_lowest + b_row, mask=b_later, other=1.0)
    b_lowest = tl.where(b_finite, tl.minimum(b_above, b_confidence), b_above)
    tl.store(p_lowest + b_row, b_lowest, mask=b_live)
    b_dropped = (b_finite & (b_confidence < tl.load(p_beta))) | (step >= tl.load(p_max_depth))
    b_chance = b_lowest / tl.maximum(b_above, _TINY)
    b_slot = tl.load(p_slots + b_row, mask=b_live, other=-1)
    if p_slope is not None:
        b_near = tl.minimum(tl.maximum(b_chance, _NEAREST), 1.0 - _NEAREST)
        b_logit = tl.log(b_near / (1.0 - b_near))
        b_chance = tl.sigmoid(tl.load(p_slope) * b_logit + tl.load(p_offsets + step))
        b_own = b_slot.to(tl.int64)
        tl.store(p_logits + b_own * logits_stride + step, b_logit, mask=b_slot >= 0)
        tl.store(p_foretold + b_own * foretold_stride + step, b_chance, mask=b_slot >= 0)
    b_chance = tl.where(b_dropped, 0.0, b_chance)
    tl.store(p_chances + b_row * chances_stride + step, b_chance, mask=b_live)
    unknown = tl.sum(((b_slot >= 0) & (b_finite == 0)).to(tl.int32), axis=0)
    if unknown > 0:
        tl.atomic_add(p_unknown, unknown.to(tl.int64))


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
    """As c2t_kernels.score_step, in one launch."""
    check_step(state, network, log_prob, entropy, margin, step, slots, beta, max_depth, chances, stats, meaning)
    rows = log_prob.shape[0]
    if rows == 0:
        return
    score_step_kernel[(triton.cdiv(rows, ROWS),)](
        *(log_prob, entropy, margin, *state),
        *network.weights().values(),
        *(step, slots, beta, max_depth, chances, stats),
        *((None,) * 4 if meaning is None else meaning),
        rows,
        *(each.stride(0) for each in (log_prob, entropy, margin, state.confidence, chances)),
        0 if stats is None else stats.stride(0),
        *((0, 0) if meaning is None else (meaning.logits.stride(0), meaning.foretold.stride(0))),
        network.depth_origin,
        **constants(network.features, len(network.hidden_bias)),
        num_warps=NUM_WARPS,
    )
