"""Step 1 of draft_stats: one pass over the logits, one program per chunk of a row. kernel.py says the rest."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_VOCAB = 524_288
GROUPS = 8192  # most groups of a row
CHUNK = 8192  # logits that a program scans: 32 per thread
CHUNKS = MAX_VOCAB // CHUNK
NUM_WARPS = 8

_GROUPS = tl.constexpr(GROUPS)
_CHUNKS = tl.constexpr(CHUNKS)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def scan_kernel(p_logits, row_stride, p_partial, p_group_max, vocab, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk with NaN or +inf reports NaN as its maximum."""
    chunks = tl.cdiv(vocab, CHUNK)
    i_chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(tl.int64)
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


def scan(logits: Tensor, partial: Tensor, group_max: Tensor) -> None:
    """Parts of every row's statistics, and the maximum of each of its groups.

    partial: (rows, 4, CHUNKS) float32, of each chunk the maximum (NaN in a broken one), the sum of exponentials, that
        of exponentials times their logarithms, and how many logits are finite.
    group_max: (rows, GROUPS) float32.
    """
    rows, vocab = logits.shape
    # one dimension, since a grid's second one ends at 65,535
    scan_kernel[(triton.cdiv(vocab, CHUNK) * rows,)](
        logits, logits.stride(0), partial, group_max, vocab, GROUP=group_size(vocab), CHUNK=CHUNK, num_warps=NUM_WARPS
    )


def group_size(vocab: int) -> int:
    """Logits per group: a power of two that depends on the vocabulary alone."""
    return triton.next_power_of_2(triton.cdiv(vocab, GROUPS))


@triton.jit
def merge(p_partial, row, chunks):
    """A row's parts as one: maximum (NaN if the row is broken), log-sum-exp, full entropy, finite logits."""
    p_partial += row * (4 * _CHUNKS)
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
