"""Step 4 of draft_stats: the largest of n logits, found by counting. kernel.py says the rest."""

from __future__ import annotations

import triton
import triton.language as tl

PACKED = 4096  # logits that are held at a time, and most that are packed

_PACKED = tl.constexpr(PACKED)
_INFINITY = tl.constexpr(float("inf"))
_NO_KEY = tl.constexpr(-(2**63))
_LOW_WORD = tl.constexpr(2**32 - 1)


@triton.jit
def _block(p_x, start, n, SHIFT: tl.constexpr):
    """Logits of one block, -inf behind the end, and their keys: integers of 32 - SHIFT bits in the logits' order."""
    b_at = start + tl.arange(0, _PACKED)
    b_x = tl.load(p_x + b_at, mask=b_at < n, other=-_INFINITY).to(tl.float32)
    # both zeros are one value
    b_bits = tl.where(b_x == 0, 0.0, b_x).to(tl.int32, bitcast=True)
    return b_x, (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def top_m_entropy(p_x, n, log_sum_exp, top_m, SHIFT: tl.constexpr, HELD: tl.constexpr):
    """Sum of -p ln p over the top_m largest of n logits, more than top_m of them finite. HELD: n is at most PACKED, so
    that they are read once: what a count of them takes is else the time to read them again."""
    low = tl.full((), 2**31 - 1, tl.int64)
    high = tl.full((), -(2**31), tl.int64)
    b_x, b_key = _block(p_x, 0, n, SHIFT)
    for start in range(0, n, _PACKED):
        if not HELD:
            b_x, b_key = _block(p_x, start, n, SHIFT)
        low = tl.minimum(low, tl.min(tl.where(b_x > -_INFINITY, b_key, 2**31 - 1), axis=0).to(tl.int64))
        high = tl.maximum(high, tl.max(tl.where(b_x > -_INFINITY, b_key, -(2**31)), axis=0).to(tl.int64) + 1)
    # at least top_m logits have a key >= low, fewer than top_m one >= high
    reached = n
    while (high - low > 1) & (reached != top_m):
        middle = (low + high) >> 1
        count = 0
        for start in range(0, n, _PACKED):
            if not HELD:
                b_x, b_key = _block(p_x, start, n, SHIFT)
            count += tl.sum(((b_key >= middle) & (b_x > -_INFINITY)).to(tl.int32), axis=0)
        reached = tl.where(count >= top_m, count, reached)
        low = tl.where(count >= top_m, middle, low)
        high = tl.where(count >= top_m, high, middle)
    above = tl.where(reached == top_m, low, high)
    total = 0.0
    count = 0
    tie = -_INFINITY
    for start in range(0, n, _PACKED):
        if not HELD:
            b_x, b_key = _block(p_x, start, n, SHIFT)
        b_above = (b_key >= above) & (b_x > -_INFINITY)
        b_p = tl.exp(b_x - log_sum_exp)
        total += tl.sum(b_p * tl.where(b_above & (b_p > 0), log_sum_exp - b_x, 0.0), axis=0)
        count += tl.sum(b_above.to(tl.int32), axis=0)
        tie = tl.maximum(tie, tl.max(tl.where(b_key == low, b_x, -_INFINITY), axis=0))
    p = tl.exp(tie - log_sum_exp)
    return total + tl.where(p > 0, (top_m - count) * p * (log_sum_exp - tie), 0.0)


@triton.jit
def _numbered(p_x, p_ids, start, n, HAS_IDS: tl.constexpr):
    """Logits of one block as integers in their order, equal ones in the opposite order of their ids."""
    b_x, b_key = _block(p_x, start, n, 0)
    b_id = start + tl.arange(0, _PACKED)
    if HAS_IDS:
        b_id = tl.load(p_ids + b_id, mask=b_id < n, other=0)
    return tl.where(b_x > -_INFINITY, (b_key.to(tl.int64) << 32) | (b_id.to(tl.int64) ^ _LOW_WORD), _NO_KEY)


@triton.jit
def leading_ids(p_x, p_ids, n, HELD: tl.constexpr, TOP: tl.constexpr, TOP_PAD: tl.constexpr):
    """Ids of the TOP largest of n logits, equal ones in the order of their ids, those of -inf last. HELD: n is at most
    PACKED, so that they are read once; they have ids of their own, p_ids."""
    b_packed = _numbered(p_x, p_ids, 0, n, HELD)
    b_place = tl.arange(0, TOP_PAD)
    b_ids = tl.full((TOP_PAD,), -1, tl.int32)
    last = tl.full((), 2**63 - 1, tl.int64)
    for i in range(TOP):
        best = tl.full((), _NO_KEY, tl.int64)
        for start in range(0, n, _PACKED):
            if not HELD:
                b_packed = _numbered(p_x, p_ids, start, n, HELD)
            best = tl.maximum(best, tl.max(tl.where(b_packed < last, b_packed, _NO_KEY), axis=0))
        chosen = ((best & _LOW_WORD) ^ _LOW_WORD).to(tl.int32)
        if best == _NO_KEY:
            # no finite logit is left, so every id that was not chosen has -inf: the lowest is next
            b_free = tl.arange(0, 2 * TOP_PAD)
            b_taken = tl.max((b_free[:, None] == b_ids[None, :]).to(tl.int32), axis=1)
            chosen = tl.min(tl.where(b_taken > 0, 2 * TOP_PAD, b_free), axis=0)
        last = best
        b_ids = tl.where(b_place == i, chosen, b_ids)
    return b_ids
