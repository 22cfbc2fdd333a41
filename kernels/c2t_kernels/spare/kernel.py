"""Spare rows of a whole batch of trees in one launch; the best nodes are found by counting, as in early_stop."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.checks import check_tensor

MAX_PLACES = 8192  # of one batch that one program can order, both sides rounded up
FEWEST_ROWS, FEWEST_SIZES = 4, 16


@triton.jit
def best_keys(b_key, b_wanted, TOGETHER: tl.constexpr):
    """The `b_wanted` largest keys of each row, or of all rows `TOGETHER`; of equals the first. 0 is no candidate."""
    # the largest threshold that at least as many keys reach, bit by bit: 0 if there are fewer
    b_threshold, step = tl.zeros_like(b_wanted), 1073741824
    for _ in range(31):
        b_trial = b_threshold + step
        b_reach = tl.sum((b_key >= b_trial[:, None]).to(tl.int32), axis=1)
        b_reach = tl.zeros_like(b_reach) + tl.sum(b_reach, axis=0) if TOGETHER else b_reach
        b_threshold = tl.where(b_reach >= b_wanted, b_trial, b_threshold)
        step = step // 2
    b_above = b_key > b_threshold[:, None]
    b_tied = (b_key == b_threshold[:, None]).to(tl.int32)
    b_left = b_wanted - tl.sum(b_above.to(tl.int32), axis=1)
    if TOGETHER:
        b_ties = tl.sum(b_tied, axis=1)
        # of a row's ties so many as those of the rows before leave
        b_left = b_wanted - tl.sum(tl.sum(b_above.to(tl.int32), axis=1), axis=0) - tl.cumsum(b_ties, axis=0) + b_ties
    b_rank = tl.cumsum(b_tied, axis=1) - b_tied
    return (b_key > 0) & (b_above | ((b_tied == 1) & (b_rank < b_left[:, None])))


# Other numbers in each step or server, and addresses within other tensors: none is a kernel of its own.
_VARIES = ("bs", "columns", "most", "n_sizes", "n_own", "keep_stride", "key_stride")


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=("p_keep", "p_key", "p_own"))
def fill_spare_rows_kernel(
    p_keep,
    p_key,
    p_sizes,
    p_own,
    p_filled,
    bs,
    columns,
    most,
    n_sizes,
    n_own,
    keep_stride,
    key_stride,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    b_row, b_column, b_size = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_S)
    b_live = b_row < bs
    b_inside = b_live[:, None] & (b_column < columns)
    b_keep = tl.load(p_keep + b_row[:, None] * keep_stride + b_column, mask=b_inside, other=0) != 0
    b_confidence = tl.load(p_key + b_row[:, None] * key_stride + b_column, mask=b_inside, other=0.0)
    b_own = tl.load(p_own + b_row, mask=b_row < n_own, other=0)
    b_free = (b_keep == 0) & (b_confidence > 0) & (b_own == 0)[:, None]
    # the bits of floats that are not negative grow with the floats
    b_key = tl.where(b_free, b_confidence.to(tl.int32, bitcast=True), 0)

    b_kept = tl.sum(b_keep.to(tl.int32), axis=1)
    rows = bs + tl.sum(b_kept, axis=0)
    b_rows = tl.load(p_sizes + b_size, mask=b_size < n_sizes, other=0).to(tl.int32)
    room = tl.min(tl.where(b_rows >= rows, b_rows - rows, 2147483647), axis=0)
    if (room > 0) & (room < 2147483647):
        if room > most - tl.max(b_kept, axis=0):
            b_key = tl.where(best_keys(b_key, most - b_kept, False), b_key, 0)
        b_keep = b_keep | best_keys(b_key, tl.zeros_like(b_kept) + room, True)
    tl.store(p_filled + b_row[:, None] * columns + b_column, b_keep.to(tl.uint8), mask=b_inside)


def fill_spare_rows(keep: Tensor, key: Tensor, most: int, sizes: Tensor, own: Tensor | None = None) -> Tensor:
    """As c2t_kernels.fill_spare_rows. Raises ValueError or TypeError for wrong shapes, dtypes, devices and strides."""
    check_tensor("fill_spare_rows: keep", keep, dtype=torch.bool, shape=(None, None))
    (bs, columns), device = keep.shape, keep.device
    check_tensor("fill_spare_rows: key", key, dtype=torch.float32, shape=(bs, columns), device=device)
    check_tensor("fill_spare_rows: sizes", sizes, dtype=torch.int64, shape=(None,), device=device)
    if own is not None:
        check_tensor("fill_spare_rows: own", own, dtype=torch.bool, shape=(bs,), device=device)
    constants, num_warps = blocks(bs, columns, len(sizes))
    if constants["BLOCK_B"] * constants["BLOCK_N"] > MAX_PLACES:
        from c2t_kernels.spare import reference

        return reference.fill_spare_rows(keep, key, most, sizes, own)
    filled = torch.empty(bs, columns, dtype=torch.bool, device=device)
    # none is read where there are none, and the kernel is the same
    owned, n_own = (keep, 0) if own is None else (own, bs)
    tensors = keep.view(torch.uint8), key, sizes, owned.view(torch.uint8), filled.view(torch.uint8)
    numbers = bs, columns, most, len(sizes), n_own, keep.stride(0), key.stride(0)
    if filled.numel():
        fill_spare_rows_kernel[(1,)](*tensors, *numbers, **constants, num_warps=num_warps)
    return filled


def blocks(bs: int, columns: int, sizes: int) -> tuple[dict[str, int], int]:
    """Constants of a launch, and its warps."""
    constants, num_warps = blocks_of_trees(bs, columns)
    return {**constants, "BLOCK_S": max(FEWEST_SIZES, triton.next_power_of_2(sizes))}, num_warps


def blocks_of_trees(bs: int, columns: int) -> tuple[dict[str, int], int]:
    """Of a program that has all columns of all trees. Rows are rounded up to powers of four, so that there are few."""
    b, n = FEWEST_ROWS, triton.next_power_of_2(columns)
    while b < bs:
        b *= 4
    return {"BLOCK_B": b, "BLOCK_N": n}, 4 if b * n <= 512 else 8 if b * n <= 4096 else 16
