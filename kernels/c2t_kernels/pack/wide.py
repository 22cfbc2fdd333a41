"""Packing of wide rows, such as queries: one program copies one tile of one row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.pack.rows import as_number, block_of


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
    block_h, num_warps = block_of(hidden)
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
