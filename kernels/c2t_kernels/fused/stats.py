"""draft_stats in two launches that read the logits once from memory, and those that could count again from the cache.

How, for a row of `vocab` logits cut into groups of `GROUP` neighbours (at most 8,192 groups) and chunks of 8,192
logits:

1. Scan, a launch with one program per chunk, which holds it in registers: maximum, sum of exponentials, sum for the
   full entropy, and the maximum of every group. Steps 2-4 are one more launch with one program per row.
2. Bound. The M-th largest *group maximum* is never above the M-th largest logit, so any L that at least M group
   maxima reach is a lower bound. L is found by halving an interval, until little more than M groups reach it.
3. Gather. Only the groups that reach L can hold a logit of the M largest. They are read again, and the logits that
   reach L are packed: with M = 1000 and 8,000 groups about 1,070 of them, if large logits are spread over the row,
   and a tenth more for the bound's coarseness.
4. Select. Halving an interval of the logits' bits finds, by counting, the threshold that the M largest reach; a value
   that several words share at the threshold counts as often as is left of M. The top k follow one by one.

A row whose packed logits would exceed 4,096 (many equal logits, M above about 3,500 and below vocab) takes step 4 over
the row itself: the same result, slowly. The order of every sum depends on the vocabulary alone, so that a row's
statistics do not depend on the batch it is in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.checks import FLOATS, check_int, check_tensor, output
from c2t_kernels.fused.configuration import Configuration
from c2t_kernels.reference.stats import DraftStats

MAX_VOCAB = 262_144
MAX_K = 32
GROUPS = 8192  # most groups of a row
PACKED = 4096  # most logits that are packed
CHUNK = 8192  # logits that a program scans: 32 per thread
CHUNKS = MAX_VOCAB // CHUNK
SCAN_WARPS = 8
SELECT_WARPS = 16

_GROUPS = tl.constexpr(GROUPS)
_PACKED = tl.constexpr(PACKED)
_CHUNKS = tl.constexpr(CHUNKS)
_INFINITY = tl.constexpr(float("inf"))
_NO_KEY = tl.constexpr(-(2**63))
_LOW_WORD = tl.constexpr(2**32 - 1)


@triton.jit
def scan_kernel(p_logits, row_stride, p_partial, p_group_max, vocab, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Step 1. A chunk with NaN or +inf reports NaN as its maximum."""
    i_chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    p_row = p_logits + row * row_stride
    p_partial += row * (4 * _CHUNKS)
    p_group_max += row * _GROUPS
    IN_CHUNK: tl.constexpr = CHUNK // GROUP
    b_group = i_chunk * IN_CHUNK + tl.arange(0, IN_CHUNK)
    b_col = b_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_x = tl.load(p_row + b_col, mask=b_col < vocab, other=-_INFINITY).to(tl.float32)
    b_broken = (b_x != b_x) | (b_x == _INFINITY)
    b_x = tl.where(b_broken, -_INFINITY, b_x)
    b_max = tl.max(b_x, axis=1)
    tl.store(p_group_max + b_group, b_max, mask=b_group < _GROUPS)
    top = tl.max(b_max, axis=0)
    base = tl.where(top == -_INFINITY, 0.0, top)
    b_e = tl.exp(b_x - base)
    # -inf and logits too far below have weight 0, and their distance must not turn that into NaN
    b_ex = b_e * tl.where(b_e > 0, b_x - base, 0.0)
    broken = tl.max(tl.max(b_broken.to(tl.int32), axis=1), axis=0) > 0
    tl.store(p_partial + i_chunk, tl.where(broken, float("nan"), top))
    tl.store(p_partial + _CHUNKS + i_chunk, tl.sum(tl.sum(b_e, axis=1), axis=0))
    tl.store(p_partial + 2 * _CHUNKS + i_chunk, tl.sum(tl.sum(b_ex, axis=1), axis=0))
    b_finite = (b_x > -_INFINITY).to(tl.int32)
    tl.store(p_partial + 3 * _CHUNKS + i_chunk, tl.sum(tl.sum(b_finite, axis=1), axis=0).to(tl.float32))


@triton.jit
def _merge(p_partial, chunks):
    """The chunks' parts as one: maximum (NaN if the row is broken), log-sum-exp, full entropy, finite logits."""
    b_at = tl.arange(0, _CHUNKS)
    b_live = b_at < chunks
    b_top = tl.load(p_partial + b_at, mask=b_live, other=-_INFINITY)
    b_sum = tl.load(p_partial + _CHUNKS + b_at, mask=b_live, other=0.0)
    b_sum_x = tl.load(p_partial + 2 * _CHUNKS + b_at, mask=b_live, other=0.0)
    finite = tl.sum(tl.load(p_partial + 3 * _CHUNKS + b_at, mask=b_live, other=0.0), axis=0).to(tl.int32)
    broken = tl.max((b_top != b_top).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(b_top != b_top, -_INFINITY, b_top), axis=0)
    b_some = b_top > -_INFINITY
    b_shift = tl.where(b_some, b_top - top, 0.0)
    b_scale = tl.where(b_some, tl.exp(b_shift), 0.0)
    total = tl.sum(b_scale * b_sum, axis=0)
    total_x = tl.sum(b_scale * (b_sum_x + tl.where(b_scale > 0, b_shift, 0.0) * b_sum), axis=0)
    entropy = tl.log(total) - total_x / total
    return tl.where(broken, float("nan"), top), top + tl.log(total), entropy, finite


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
def _block(p_x, start, n, SHIFT: tl.constexpr):
    """Logits of one block, -inf behind the end, and their keys: integers of 32 - SHIFT bits in the logits' order."""
    b_at = start + tl.arange(0, _PACKED)
    b_x = tl.load(p_x + b_at, mask=b_at < n, other=-_INFINITY).to(tl.float32)
    # both zeros are one value
    b_bits = tl.where(b_x == 0, 0.0, b_x).to(tl.int32, bitcast=True)
    return b_x, (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _count(p_x, n, key, SHIFT: tl.constexpr):
    count = 0
    for start in range(0, n, _PACKED):
        b_x, b_key = _block(p_x, start, n, SHIFT)
        count += tl.sum(((b_key >= key) & (b_x > -_INFINITY)).to(tl.int32), axis=0)
    return count


@triton.jit
def _entropy(p_x, n, log_sum_exp, top_m, SHIFT: tl.constexpr):
    """Sum of -p ln p over the top_m largest of n logits, more than top_m of them finite."""
    low = tl.full((), 2**31 - 1, tl.int64)
    high = tl.full((), -(2**31), tl.int64)
    for start in range(0, n, _PACKED):
        b_x, b_key = _block(p_x, start, n, SHIFT)
        low = tl.minimum(low, tl.min(tl.where(b_x > -_INFINITY, b_key, 2**31 - 1), axis=0).to(tl.int64))
        high = tl.maximum(high, tl.max(tl.where(b_x > -_INFINITY, b_key, -(2**31)), axis=0).to(tl.int64) + 1)
    # at least top_m logits have a key >= low, fewer than top_m one >= high
    reached = n
    while (high - low > 1) & (reached != top_m):
        middle = (low + high) >> 1
        count = _count(p_x, n, middle, SHIFT)
        reached = tl.where(count >= top_m, count, reached)
        low = tl.where(count >= top_m, middle, low)
        high = tl.where(count >= top_m, high, middle)
    above = tl.where(reached == top_m, low, high)
    total = 0.0
    count = 0
    tie = -_INFINITY
    for start in range(0, n, _PACKED):
        b_x, b_key = _block(p_x, start, n, SHIFT)
        b_above = (b_key >= above) & (b_x > -_INFINITY)
        b_p = tl.exp(b_x - log_sum_exp)
        total += tl.sum(b_p * tl.where(b_above & (b_p > 0), log_sum_exp - b_x, 0.0), axis=0)
        count += tl.sum(b_above.to(tl.int32), axis=0)
        tie = tl.maximum(tie, tl.max(tl.where(b_key == low, b_x, -_INFINITY), axis=0))
    p = tl.exp(tie - log_sum_exp)
    return total + tl.where(p > 0, (top_m - count) * p * (log_sum_exp - tie), 0.0)


@triton.jit
def _leading(p_x, p_ids, n, HAS_IDS: tl.constexpr, TOP: tl.constexpr, TOP_PAD: tl.constexpr):
    """Ids of the TOP largest of n logits, equal ones in the order of their ids, those of -inf last."""
    b_place = tl.arange(0, TOP_PAD)
    b_ids = tl.full((TOP_PAD,), -1, tl.int32)
    last = tl.full((), 2**63 - 1, tl.int64)
    for i in range(TOP):
        best = tl.full((), _NO_KEY, tl.int64)
        for start in range(0, n, _PACKED):
            b_x, b_key = _block(p_x, start, n, 0)
            b_id = start + tl.arange(0, _PACKED)
            if HAS_IDS:
                b_id = tl.load(p_ids + b_id, mask=b_id < n, other=0)
            b_packed = (b_key.to(tl.int64) << 32) | (b_id.to(tl.int64) ^ _LOW_WORD)
            b_packed = tl.where((b_x > -_INFINITY) & (b_packed < last), b_packed, _NO_KEY)
            best = tl.maximum(best, tl.max(b_packed, axis=0))
        chosen = ((best & _LOW_WORD) ^ _LOW_WORD).to(tl.int32)
        if best == _NO_KEY:
            # no finite logit is left, so every id that was not chosen has -inf: the lowest is next
            b_free = tl.arange(0, 2 * TOP_PAD)
            b_taken = tl.max((b_free[:, None] == b_ids[None, :]).to(tl.int32), axis=1)
            chosen = tl.min(tl.where(b_taken > 0, 2 * TOP_PAD, b_free), axis=0)
        last = best
        b_ids = tl.where(b_place == i, chosen, b_ids)
    return b_ids


@triton.jit
def select_kernel(
    p_logits,
    row_stride,
    p_ids,
    p_log_probs,
    p_entropy,
    p_margin,
    p_partial,
    p_group_max,
    p_hits,
    p_packed,
    p_packed_ids,
    top_m,
    vocab,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    TOP_M_IN_MEMORY: tl.constexpr,
):
    """Steps 2-4 for one row."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * row_stride
    p_hits += row * _GROUPS
    p_packed += row * _PACKED
    p_packed_ids += row * _PACKED
    TOP: tl.constexpr = K if K > 2 else 2
    TOP_PAD: tl.constexpr = triton.next_power_of_2(TOP)

    m = top_m
    if TOP_M_IN_MEMORY:
        m = tl.maximum(tl.load(top_m), 1)
    top, log_sum_exp, entropy, finite = _merge(p_partial + row * (4 * _CHUNKS), tl.cdiv(vocab, CHUNK))
    b_place = tl.arange(0, TOP_PAD)
    b_ids = b_place
    b_x = tl.full((TOP_PAD,), float("nan"), tl.float32)
    if (top == top) & (finite > 0):
        b_at = tl.arange(0, _GROUPS)
        b_group_max = tl.load(p_group_max + row * _GROUPS + b_at, mask=b_at < tl.cdiv(vocab, GROUP), other=-_INFINITY)
        # the entropy of all finite words came with the scan; then the bound is for the top k alone
        wanted = tl.minimum(tl.where(m >= finite, TOP, tl.maximum(m, TOP)), finite)
        bound = _bound(b_group_max, top, wanted)
        packed = _gather(p_row, p_hits, p_packed, p_packed_ids, b_group_max, bound, vocab, GROUP)
        if packed <= _PACKED:
            b_ids = _leading(p_packed, p_packed_ids, packed, True, TOP, TOP_PAD)
            if m < finite:
                entropy = _entropy(p_packed, packed, log_sum_exp, m, SHIFT)
        else:
            b_ids = _leading(p_row, p_packed_ids, vocab, False, TOP, TOP_PAD)
            if m < finite:
                entropy = _entropy(p_row, vocab, log_sum_exp, m, SHIFT)
        b_x = tl.load(p_row + b_ids, mask=b_ids < vocab, other=-_INFINITY).to(tl.float32) - log_sum_exp
    else:
        entropy = float("nan")
    tl.store(p_ids + row * K + b_place, b_ids.to(tl.int64), mask=b_place < K)
    tl.store(p_log_probs + row * K + b_place, b_x, mask=b_place < K)
    tl.store(p_entropy + row, entropy)
    first = tl.sum(tl.where(b_place == 0, b_x, 0.0), axis=0)
    second = tl.sum(tl.where(b_place == 1, b_x, 0.0), axis=0)
    tl.store(p_margin + row, tl.where(vocab > 1, first - second, entropy * 0))


@dataclass(frozen=True)
class DraftStatsWorkspace:
    """Scratch memory of draft_stats for up to `rows` rows, one call at a time: 97 KiB per row. Made by `create`."""

    partial: Tensor
    group_max: Tensor
    hits: Tensor
    packed: Tensor
    packed_ids: Tensor

    @classmethod
    def create(cls, rows: int, device: torch.device | str) -> DraftStatsWorkspace:
        """rows: largest batch. device: of the logits."""
        check_int("DraftStatsWorkspace: rows", rows, 0)
        return cls(
            partial=torch.empty(rows, 4, CHUNKS, dtype=torch.float32, device=device),
            group_max=torch.empty(rows, GROUPS, dtype=torch.float32, device=device),
            hits=torch.empty(rows, GROUPS, dtype=torch.int32, device=device),
            packed=torch.empty(rows, PACKED, dtype=torch.float32, device=device),
            packed_ids=torch.empty(rows, PACKED, dtype=torch.int32, device=device),
        )


def group_size(vocab: int) -> int:
    """Logits per group: a power of two that depends on the vocabulary alone."""
    return triton.next_power_of_2(triton.cdiv(vocab, GROUPS))


# bits of a float32 that are the same in every value that came from this type
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


def draft_stats(
    logits: Tensor,
    top_m: int | Tensor,
    k: int = 1,
    *,
    out: DraftStats | None = None,
    workspace: DraftStatsWorkspace | None = None,
) -> DraftStats:
    """As c2t_kernels.reference.stats.draft_stats, in two launches and without a host synchronisation.

    logits: (rows, vocab) float32, bfloat16 or float16, rows of any stride, vocab <= 262,144.
    top_m: an int, or one int32 on the device, read at launch; there a value below 1 counts as 1.
    k: 1 <= k <= min(vocab, 32). Equal logits are returned in the order of their ids.
    out: buffers to write, of the result's shapes and dtypes; else new ones.
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
    device = logits.device
    result = DraftStats(
        output("draft_stats: out.token_ids", given.token_ids, (rows, k), torch.int64, device),
        output("draft_stats: out.log_probs", given.log_probs, (rows, k), torch.float32, device),
        output("draft_stats: out.entropy", given.entropy, (rows,), torch.float32, device),
        output("draft_stats: out.margin", given.margin, (rows,), torch.float32, device),
    )
    if workspace is None:
        workspace = DraftStatsWorkspace.create(rows, device)
    check_tensor("draft_stats: workspace", workspace.partial, device=device)
    if workspace.partial.shape[0] < rows:
        raise ValueError(f"draft_stats: workspace is for {workspace.partial.shape[0]} rows, got {rows}")
    if rows:
        _launch(logits, top_m, k, result, workspace)
    return result


def _launch(logits: Tensor, top_m: int | Tensor, k: int, result: DraftStats, workspace: DraftStatsWorkspace) -> None:
    rows, vocab = logits.shape
    group = group_size(vocab)
    scan_kernel[(triton.cdiv(vocab, CHUNK), rows)](
        logits,
        logits.stride(0),
        workspace.partial,
        workspace.group_max,
        vocab,
        GROUP=group,
        CHUNK=CHUNK,
        num_warps=SCAN_WARPS,
    )
    select_kernel[(rows,)](
        logits,
        logits.stride(0),
        *result,
        workspace.partial,
        workspace.group_max,
        workspace.hits,
        workspace.packed,
        workspace.packed_ids,
        top_m,
        vocab,
        K=k,
        GROUP=group,
        CHUNK=CHUNK,
        SHIFT=SHIFTS[logits.dtype],
        TOP_M_IN_MEMORY=isinstance(top_m, Tensor),
        num_warps=SELECT_WARPS,
    )


def _configurations(dtype: torch.dtype, word: str, vocab: int, k: int, in_memory: bool) -> tuple[Configuration, ...]:
    group = group_size(vocab)
    aligned = ("row_stride", "vocab") if vocab % 16 == 0 else ()
    logits = {"p_logits": f"*{word}", "row_stride": "i32"}
    parts = {"p_partial": "*fp32", "p_group_max": "*fp32"}
    scan = Configuration(
        scan_kernel,
        f"scan_{word}_{vocab}_k{k}",
        {**logits, **parts, "vocab": "i32", "GROUP": "constexpr", "CHUNK": "constexpr"},
        {"GROUP": group, "CHUNK": CHUNK},
        num_warps=SCAN_WARPS,
        aligned=aligned,
    )
    select = Configuration(
        select_kernel,
        f"select_{word}_{vocab}_k{k}{'_memory' * in_memory}",
        {
            **logits,
            "p_ids": "*i64",
            **{name: "*fp32" for name in ("p_log_probs", "p_entropy", "p_margin")},
            **parts,
            "p_hits": "*i32",
            "p_packed": "*fp32",
            "p_packed_ids": "*i32",
            "top_m": "*i32" if in_memory else "i32",
            "vocab": "i32",
            **{name: "constexpr" for name in ("K", "GROUP", "CHUNK", "SHIFT", "TOP_M_IN_MEMORY")},
        },
        {"K": k, "GROUP": group, "CHUNK": CHUNK, "SHIFT": SHIFTS[dtype], "TOP_M_IN_MEMORY": in_memory},
        num_warps=SELECT_WARPS,
        aligned=aligned,
    )
    return scan, select


# One per type, and one per group size (1, 4, 16 and 32); the rest differ in k alone.
CONFIGURATIONS = (
    *_configurations(torch.bfloat16, "bf16", 128_256, 1, True),
    *_configurations(torch.float16, "fp16", 128_256, 1, False),
    *_configurations(torch.float32, "fp32", 128_256, 1, True),
    *_configurations(torch.float32, "fp32", 1023, 2, False),
    *_configurations(torch.bfloat16, "bf16", 32_000, 8, True),
    *_configurations(torch.bfloat16, "bf16", 151_936, 32, True),
    *_configurations(torch.float32, "fp32", 262_144, 32, False),
)
