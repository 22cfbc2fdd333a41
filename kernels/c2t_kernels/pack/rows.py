"""Rows of a packed batch (logits, hidden states, words) put back: one program copies one tile of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_H = 4096  # elements of a row that one program copies


@triton.jit(do_not_specialize=["fill", "width"])
def scatter_rows_kernel(p_packed, p_strided, p_cu_seqlens, fill, packed_stride, width, hidden, BLOCK_H: tl.constexpr):
    i_row = tl.program_id(0)
    b_at = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    b_inside = b_at < hidden
    row = tl.load(p_cu_seqlens + i_row // width) + i_row % width
    own = row < tl.load(p_cu_seqlens + i_row // width + 1)
    p_row = p_packed + row.to(tl.int64) * packed_stride
    b_values = tl.load(p_row + b_at, mask=b_inside & own, other=0)
    b_values = tl.where(own, b_values, tl.full((BLOCK_H,), fill, p_strided.dtype.element_ty))
    tl.store(p_strided + i_row.to(tl.int64) * hidden + b_at, b_values, mask=b_inside)


def scatter_rows(packed: Tensor, strided: Tensor, cu_seqlens: Tensor, fill: float) -> None:
    """Rows of (capacity, ...) to their places in (bs, width, ...), the rest of it filled with `fill`."""
    bs, width = strided.shape[:2]
    hidden = strided.shape[2] if strided.dim() == 3 else 1
    block_h, num_warps = block_of(hidden)
    scatter_rows_kernel[(bs * width, triton.cdiv(hidden, block_h))](
        packed,
        strided,
        cu_seqlens,
        as_number(fill, packed.dtype),
        packed.stride(0),
        width,
        hidden,
        BLOCK_H=block_h,
        num_warps=num_warps,
    )


def as_number(value: float, dtype: torch.dtype) -> float:
    """The value as the kind of number that a kernel for this dtype takes."""
    return float(value) if dtype.is_floating_point else int(value)


def block_of(hidden: int) -> tuple[int, int]:
    """Elements of a row that one program copies, and its warps."""
    block_h = min(triton.next_power_of_2(hidden), MAX_BLOCK_H)
    return block_h, 4 if block_h >= 1024 else 1
