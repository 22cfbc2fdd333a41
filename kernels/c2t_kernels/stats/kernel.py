"""draft_stats in two launches that read the logits once from memory, and those that could count again from the cache.

How, for a row of `vocab` logits cut into groups of `GROUP` neighbours (at most 8,192 groups) and chunks of 8,192
logits:

1. Scan (scan.py), a launch with one program per chunk, which holds it in registers: maximum, sum of
   exponentials, sum for the full entropy, and the maximum of every group. Steps 2-4 are one more launch with one
   program per row.
2. Bound. The M-th largest *group maximum* is never above the M-th largest logit, so any L that at least M group
   maxima reach is a lower bound. L is found by halving an interval, until little more than M groups reach it.
3. Gather. Only the groups that reach L can hold a logit of the M largest. They are read again, and the logits that
   reach L are packed: with M = 1000 and 8,000 groups about 1,070 of them, if large logits are spread over the row,
   and a tenth more for the bound's coarseness.
4. Select (largest.py). Halving an interval of the logits' bits finds, by counting, the threshold that the M
   largest reach; a value that several tokens share at the threshold counts as often as is left of M. The top k follow
   one by one.

A row whose packed logits would exceed 4,096 (many equal logits, M above about 3,500 and below vocab) takes step 4 over
the row itself: the same result, slowly. The order of every sum depends on the vocabulary alone, so that a row's
statistics do not depend on the batch it is in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.checks import FLOATS, check_int, check_tensor, output
from c2t_kernels.stats.largest import PACKED, leading_ids, top_m_entropy
from c2t_kernels.stats.result import DraftStats
from c2t_kernels.stats.scan import CHUNK, GROUPS, MAX_VOCAB, group_size, merge, scan
from c2t_kernels.stats.workspace import DraftStatsWorkspace

MAX_K = 32
SELECT_WARPS = 16

_GROUPS = tl.constexpr(GROUPS)
_PACKED = tl.constexpr(PACKED)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _bound(b_group_max, top, wanted):
    """Step 2: a value that at least `wanted` group maxima reach, or -inf where too few groups are finite."""
    b_finite = b_group_max > -_INFINITY
    low = tl.min(tl.where(b_finite, b_group_max, _INFINITY), axis=0)
    high = top
    reached = tl.sum(b_finite.to(tl.int32), axis=0)
    if reached < wanted:
        low = low - _INFINITY
    # within an eighth the groups that are gathered for nothing cost less than a further halving
    enough = wanted + wanted // 8 + 16
    step = 0
    while (reached > enough) & (step < 32):
        middle = 0.5 * low + 0.5 * high
        count = tl.sum((b_group_max >= middle).to(tl.int32), axis=0)
        low = tl.where(count >= wanted, middle, low)
        high = tl.where(count >= wanted, high, middle)
        reached = tl.where(count >= wanted, count, reached)
        step += 1
    return low


@triton.jit
def _gather(p_row, p_hits, p_packed, p_packed_ids, b_group_max, bound, vocab, GROUP: tl.constexpr):
    """Step 3: pack the logits that reach the bound, in the order of their ids; returns how many there are."""
    b_at = tl.arange(0, _GROUPS)
    b_hit = (b_group_max >= bound) & (b_group_max > -_INFINITY)
    hits = tl.sum(b_hit.to(tl.int32), axis=0)
    tl.store(p_hits + tl.cumsum(b_hit.to(tl.int32), axis=0) - 1, b_at, mask=b_hit)
    tl.debug_barrier()
    packed = 0
    for start in range(0, hits * GROUP, _PACKED):
        b_place = start + tl.arange(0, _PACKED)
        b_live = b_place < hits * GROUP
        b_col = tl.load(p_hits + b_place // GROUP, mask=b_live, other=0) * GROUP + b_place % GROUP
        b_x = tl.load(p_row + b_col, mask=b_live & (b_col < vocab), other=-_INFINITY).to(tl.float32)
        b_keep = (b_x >= bound) & (b_x > -_INFINITY)
        b_to = packed + tl.cumsum(b_keep.to(tl.int32), axis=0) - 1
        b_fits = b_keep & (b_to < _PACKED)
        tl.store(p_packed + b_to, b_x, mask=b_fits)
        tl.store(p_packed_ids + b_to, b_col, mask=b_fits)
        packed += tl.sum(b_keep.to(tl.int32), axis=0)
    tl.debug_barrier()
    return packed


@triton.jit
def select_kernel(
    p_logits,
    row_stride,
    p_ids,
    p_log_probs,
    p_entropy,
    p_margin,
    p_at,
    p_partial,
    p_group_max,
    p_hits,
    p_packed,
    p_packed_ids,
    top_m,
    vocab,
    K: tl.constexpr,
    TOP_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    TOP_M_IN_MEMORY: tl.constexpr,
):
    """Steps 2-4 for one row. TOP_PAD: a power of two, not below K and 2."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * row_stride
    p_hits += row * _GROUPS
    p_packed += row * _PACKED
    p_packed_ids += row * _PACKED
    TOP: tl.constexpr = K if K > 2 else 2

    m = top_m
    if TOP_M_IN_MEMORY:
        m = tl.maximum(tl.load(top_m), 1)
    top, log_sum_exp, entropy, finite = merge(p_partial, row, tl.cdiv(vocab, CHUNK))
    b_place = tl.arange(0, TOP_PAD)
    b_ids = b_place
    b_x = tl.full((TOP_PAD,), float("nan"), tl.float32)
    if (top == top) & (finite > 0):
        b_at = tl.arange(0, _GROUPS)
        b_group_max = tl.load(p_group_max + row * _GROUPS + b_at, mask=b_at < tl.cdiv(vocab, GROUP), other=-_INFINITY)
        # the entropy of all finite tokens came with the scan; then the bound is for the top k alone
        wanted = tl.minimum(tl.where(m >= finite, TOP, tl.maximum(m, TOP)), finite)
        bound = _bound(b_group_max, top, wanted)
        packed = _gather(p_row, p_hits, p_packed, p_packed_ids, b_group_max, bound, vocab, GROUP)
        if packed <= _PACKED:
            b_ids = leading_ids(p_packed, p_packed_ids, packed, True, TOP, TOP_PAD)
            if m < finite:
                entropy = top_m_entropy(p_packed, packed, log_sum_exp, m, SHIFT, True)
        else:
            b_ids = leading_ids(p_row, p_packed_ids, vocab, False, TOP, TOP_PAD)
            if m < finite:
                entropy = top_m_entropy(p_row, vocab, log_sum_exp, m, SHIFT, False)
        # places behind the top k have the id -1, which lies before the row
        b_x = tl.load(p_row + b_ids, mask=(b_ids >= 0) & (b_ids < vocab), other=-_INFINITY).to(tl.float32) - log_sum_exp
    else:
        entropy = float("nan")
    at = row
    if p_at is not None:
        at = tl.load(p_at + row)
    tl.store(p_ids + at * K + b_place, b_ids.to(tl.int64), mask=b_place < K)
    tl.store(p_log_probs + at * K + b_place, b_x, mask=b_place < K)
    tl.store(p_entropy + at, entropy)
    first = tl.sum(tl.where(b_place == 0, b_x, 0.0), axis=0)
    second = tl.sum(tl.where(b_place == 1, b_x, 0.0), axis=0)
    tl.store(p_margin + at, tl.where(vocab > 1, first - second, entropy * 0))


# bits of a float32 that are the same in every value that came from this type
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


def draft_stats(
    logits: Tensor,
    top_m: int | Tensor,
    k: int = 1,
    *,
    out: DraftStats | None = None,
    at: Tensor | None = None,
    workspace: DraftStatsWorkspace | None = None,
) -> DraftStats:
    """As c2t_kernels.draft_stats, in two launches and without a host synchronisation.

    logits: (rows, vocab) float32, bfloat16 or float16, rows of any stride, vocab <= 524,288.
    top_m: an int, or one int32 on the device, read at launch; there a value below 1 counts as 1.
    k: 1 <= k <= min(vocab, 32). Equal logits are returned in the order of their ids.
    workspace: for at least as many rows, used by no other call at the same time; else a new one. Both have to be
        given where the addresses must outlive the call, as in a CUDA graph that others replay beside it.

    A row without statistics (NaN in every float field) has the ids 0 to k - 1.
    """
    check_tensor("draft_stats: logits", logits, dtype=FLOATS, shape=(None, None))
    rows, vocab = logits.shape
    check_int("draft_stats: vocabulary", vocab, 1, MAX_VOCAB)
    check_int("draft_stats: k", k, 1, min(vocab, MAX_K))
    if isinstance(top_m, Tensor):
        check_tensor("draft_stats: top_m", top_m, dtype=torch.int32, device=logits.device)
        if top_m.numel() != 1:
            raise ValueError(f"draft_stats: top_m must be one number, got shape {tuple(top_m.shape)}")
    else:
        check_int("draft_stats: top_m", top_m, 1)
        top_m = min(top_m, vocab)
    given = DraftStats(None, None, None, None) if out is None else out  # type: ignore[arg-type]
    device, size = logits.device, rows
    if at is not None:
        if out is None:
            raise ValueError("draft_stats: at says where in out a result goes, and there is no out")
        check_tensor("draft_stats: at", at, dtype=torch.int64, shape=(rows,), device=device)
        size = len(out.entropy)
    result = DraftStats(
        output("draft_stats: out.token_ids", given.token_ids, (size, k), torch.int64, device),
        output("draft_stats: out.log_probs", given.log_probs, (size, k), torch.float32, device),
        output("draft_stats: out.entropy", given.entropy, (size,), torch.float32, device),
        output("draft_stats: out.margin", given.margin, (size,), torch.float32, device),
    )
    if workspace is None:
        workspace = DraftStatsWorkspace.create(rows, device)
    if not isinstance(workspace, DraftStatsWorkspace):
        raise TypeError(f"draft_stats: workspace must be a DraftStatsWorkspace, got {type(workspace).__name__}")
    check_tensor("draft_stats: workspace", workspace.partial, device=device)
    if workspace.partial.shape[0] < rows:
        raise ValueError(f"draft_stats: workspace is for {workspace.partial.shape[0]} rows, got {rows}")
    if rows:
        _launch(logits, top_m, k, result, at, workspace)
    return result


def _launch(
    logits: Tensor,
    top_m: int | Tensor,
    k: int,
    result: DraftStats,
    at: Tensor | None,
    workspace: DraftStatsWorkspace,
) -> None:
    rows, vocab = logits.shape
    scan(logits, workspace.partial, workspace.group_max)
    select_kernel[(rows,)](
        logits,
        logits.stride(0),
        *result,
        at,
        *(workspace.partial, workspace.group_max, workspace.hits, workspace.packed, workspace.packed_ids),
        top_m,
        vocab,
        K=k,
        TOP_PAD=top_pad(k),
        GROUP=group_size(vocab),
        CHUNK=CHUNK,
        SHIFT=SHIFTS[logits.dtype],
        TOP_M_IN_MEMORY=isinstance(top_m, Tensor),
        num_warps=SELECT_WARPS,
    )


def top_pad(k: int) -> int:
    """Places for the k largest and for the two that the margin is taken of."""
    return triton.next_power_of_2(max(k, 2))
