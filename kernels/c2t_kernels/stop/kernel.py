"""Ends of the chains of a whole batch in one launch; the best tokens under a budget are found by counting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.checks import check_int, check_tensor, output, per_request

MAX_TOKENS = 8192  # slots of one batch that one program can order, both sides rounded up to a power of two
ROWS_ALONE = 32  # rows of one program where no request depends on another
FEWEST_ROWS, FEWEST_COLUMNS = 16, 8  # that a program is made for, where there is room
MOST = 2**31 - 1  # of a budget


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _count(b_flag):
    return tl.sum(tl.sum(b_flag.to(tl.int32), axis=1), axis=0)


@triton.jit
def _best(b_key, b_candidate, wanted):
    """The `wanted` candidates of largest key; of equals the shallower, then the lower row."""
    b_key = tl.where(b_candidate, b_key, -1)
    # Largest threshold that at least `wanted` keys reach, bit by bit: 0 if there are fewer candidates than wanted.
    threshold = 0
    step = 1073741824
    for _ in range(31):
        trial = threshold + step
        threshold = tl.where(_count(b_key >= trial) >= wanted, trial, threshold)
        step = step // 2
    b_tied = (b_key == threshold).to(tl.int32)
    b_per_depth = tl.sum(b_tied, axis=0)
    b_shallower = tl.cumsum(b_per_depth, axis=0) - b_per_depth
    b_rank = b_shallower[None, :] + tl.cumsum(b_tied, axis=0) - b_tied
    left = wanted - _count(b_key > threshold)
    return b_candidate & ((b_key > threshold) | ((b_tied == 1) & (b_rank < left)))


# Other numbers in each step, and addresses within other tensors: none is a kernel of its own, compiled while it serves.
_VARIES = ("room", "bs", "confidence_stride", "beta_stride", "max_depth_stride", "links_stride", "d_max")


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=("p_beta", "p_max_depth", "p_links"))
def early_stop_kernel(
    p_confidence,
    p_beta,
    p_max_depth,
    p_budget,
    room,
    p_lengths,
    p_unclipped,
    p_unknown,
    p_links,
    bs,
    confidence_stride,
    beta_stride,
    max_depth_stride,
    links_stride,
    d_max,
    LIMITED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b_row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    b_live = b_row < bs
    b_row64 = b_row.to(tl.int64)
    b_depth = tl.arange(0, BLOCK_D)
    b_inside = b_live[:, None] & (b_depth[None, :] < d_max)
    p_token = p_confidence + b_row64[:, None] * confidence_stride + b_depth[None, :]
    b_confidence = tl.load(p_token, mask=b_inside, other=0.0)
    if p_unknown is not None:
        # before all else: further down it would make the largest batches spill
        unknown = _count(b_confidence != b_confidence)
        if unknown > 0:
            tl.atomic_add(p_unknown, unknown.to(tl.int64))
    b_beta = tl.load(p_beta + b_row64 * beta_stride, mask=b_live, other=0.0)
    b_max_depth = tl.load(p_max_depth + b_row64 * max_depth_stride, mask=b_live, other=0)

    b_allowed = b_inside & (b_depth[None, :] < b_max_depth[:, None])
    b_dropped = tl.where(b_inside & (b_confidence < b_beta[:, None]), b_depth[None, :], d_max)
    b_kept = b_allowed & (b_depth[None, :] < tl.min(b_dropped, axis=1)[:, None])

    if p_unclipped is not None:
        tl.store(p_unclipped + b_row64, tl.sum(b_kept.to(tl.int32), axis=1), mask=b_live)

    if LIMITED:
        b_confidence = tl.where(b_confidence != b_confidence, float("inf"), b_confidence)
        # The bits of floats that are not negative grow with the floats.
        b_key = tl.associative_scan(b_confidence.to(tl.int32, bitcast=True), 1, _smaller)
        if p_budget is not None:
            room = tl.maximum(tl.load(p_budget), 0).to(tl.int32)
        if _count(b_kept) > room:
            b_kept = _best(b_key, b_kept, room)

    tl.store(p_lengths + b_row64, tl.sum(b_kept.to(tl.int32), axis=1), mask=b_live)
    if p_links is not None:
        # read again, with which nothing of above is held in registers: the largest batches would spill
        tl.debug_barrier()
        b_at = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
        b_length = tl.load(p_lengths + b_at, mask=b_at < bs, other=0)
        tl.store(p_links + b_at.to(tl.int64) * links_stride + b_length, -1, mask=b_at < bs)


def early_stop(
    confidence: Tensor,
    beta: Tensor | float,
    max_depth: Tensor | int,
    *,
    budget: Tensor | int | None = None,
    unclipped: Tensor | None = None,
    unknown: Tensor | None = None,
    links: Tensor | None = None,
) -> Tensor:
    """As c2t_kernels.early_stop, in one launch.

    beta, max_depth, budget: also 1-element tensors of the device (float32, int32, int32), read at run time.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices and strides, and for more slots than one program
    can order (MAX_TOKENS, only with a budget).
    """
    check_tensor("early_stop: confidence", confidence, dtype=torch.float32, shape=(None, None))
    bs, d_max = confidence.shape
    device = confidence.device
    if d_max < 1:
        raise ValueError("early_stop: confidence must have at least one column, got shape " + str((bs, d_max)))
    beta, beta_stride = per_request("early_stop: beta", beta, bs, torch.float32, device)
    max_depth, max_depth_stride = per_request("early_stop: max_depth", max_depth, bs, torch.int32, device)
    limited, at, room = budget is not None, None, 0
    if isinstance(budget, Tensor):
        at, _ = per_request("early_stop: budget", budget, 1, torch.int32, device)
    elif budget is not None:
        check_int("early_stop: budget", budget, 0, MOST)
        room = budget
    if unclipped is not None:
        output("early_stop: unclipped", unclipped, (bs,), torch.int32, device)
    if unknown is not None:
        output("early_stop: unknown", unknown, (1,), torch.int64, device)
    if links is not None:
        check_tensor("early_stop: links", links, dtype=torch.int64, shape=(bs, None), device=device)
        check_int("early_stop: columns of links", links.shape[1], d_max + 1)
    lengths = torch.empty(bs, dtype=torch.int32, device=device)
    if bs == 0:
        return lengths
    block_b, block_d, num_warps = blocks(bs, d_max, limited)
    given = confidence, beta, max_depth, at, room, lengths, unclipped, unknown, links
    strides = confidence.stride(0), beta_stride, max_depth_stride, 0 if links is None else links.stride(0)
    constants = {"LIMITED": limited, "BLOCK_B": block_b, "BLOCK_D": block_d, "num_warps": num_warps}
    early_stop_kernel[(triton.cdiv(bs, block_b),)](*given, bs, *strides, d_max, **constants)
    return lengths


def blocks(bs: int, d_max: int, together: bool) -> tuple[int, int, int]:
    """Rows and columns of one program, and its warps. Small ones are rounded up further, so that there are few."""
    block_b, block_d = triton.next_power_of_2(bs), triton.next_power_of_2(d_max)
    if not together:
        return ROWS_ALONE, max(FEWEST_COLUMNS, block_d), 4
    rounded = max(FEWEST_ROWS, block_b), max(FEWEST_COLUMNS, block_d)
    if rounded[0] * rounded[1] <= MAX_TOKENS:
        block_b, block_d = rounded
    if block_b * block_d > MAX_TOKENS:
        raise ValueError(
            f"early_stop: confidence with a budget can have at most {MAX_TOKENS} elements, rows and columns "
            f"rounded up to powers of two; got {block_b} * {block_d}"
        )
    elements = block_b * block_d
    # 1,024 elements spill in 4 warps, where 2,048 do not
    return block_b, block_d, 8 if elements == 1024 or elements > 2048 else 4
