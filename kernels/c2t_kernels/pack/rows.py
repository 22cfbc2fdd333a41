"""Wide rows (logits, hidden states) of ragged packing: one program copies one tile of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_H = 4096  # elements of a row that one program copies


# Requests and their rows are others in each step; what a row holds is the model's.
@triton.jit(do_not_specialize=["pad", "bs", "width"])
def pack_rows_kernel(
    p_source, p_packed, p_cu_seqlens, pad, request_stride, row_stride, bs, width, hidden, BLOCK_H: tl.constexpr
):
    i_row = tl.program_id(0)
    b_at = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    b_inside = b_at < hidden
    if i_row < bs * width:
        i_request, i_node = i_row // width, i_row % width
        row = tl.load(p_cu_seqlens + i_request) + i_node
        if row < tl.load(p_cu_seqlens + i_request + 1):
            p_row = p_source + i_request.to(tl.int64) * request_stride + i_node.to(tl.int64) * row_stride
            b_values = tl.load(p_row + b_at, mask=b_inside)
            tl.store(p_packed + row.to(tl.int64) * hidden + b_at, b_values, mask=b_inside)
    else:
        row = i_row - bs * width
        if row >= tl.load(p_cu_seqlens + bs):
            b_pad = tl.full((BLOCK_H,), pad, p_packed.dtype.element_ty)
            tl.store(p_packed + row.to(tl.int64) * hidden + b_at, b_pad, mask=b_inside)


def pack_rows(source: Tensor, packed: Tensor, cu_seqlens: Tensor, pad: float) -> None:
    """Rows of (bs, width, hidden) to their places in (capacity, hidden), the rest of it filled with `pad`."""
    bs, width, hidden = source.shape
    block_h, num_warps = _block(hidden)
    pack_rows_kernel[(bs * width + packed.shape[0], triton.cdiv(hidden, block_h))](
        source,
        packed,
        cu_seqlens,
        as_number(pad, source.dtype),
        source.stride(0),
        source.stride(1),
        bs,
        width,
        hidden,
        BLOCK_H=block_h,
        num_warps=num_warps,
    )


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
    block_h, num_warps = _block(hidden)
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


def _block(hidden: int) -> tuple[int, int]:
    """Elements of a row that one program copies, and its warps."""
    block_h = min(triton.next_power_of_2(hidden), MAX_BLOCK_H)
    return block_h, 4 if block_h >= 1024 else 1
