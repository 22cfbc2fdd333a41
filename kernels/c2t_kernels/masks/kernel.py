"""Tree masks over prefix and tree, one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.checks import INTEGERS, check_int, check_tensor, output

BLOCK_C = 1024  # elements of a row that are written at a time
MAX_REQUESTS = 4096
FEWEST_REQUESTS = 16  # that a program is made for


# Requests and their room are others in each step.
@triton.jit(do_not_specialize=["bs", "capacity"])
def full_mask_kernel(
    p_tree_mask,
    p_prefix_lens,
    p_counts,
    p_mask,
    p_indptr,
    bs,
    capacity,
    BUCKET: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_request, i_node = tl.program_id(0), tl.program_id(1)
    b_request = tl.arange(0, BLOCK_B)
    b_prefix = tl.load(p_prefix_lens + b_request, mask=b_request < bs, other=0).to(tl.int64)
    b_rows = tl.zeros((BLOCK_B,), tl.int64) + BUCKET
    if p_counts is not None:
        b_rows = tl.load(p_counts + b_request, mask=b_request < bs, other=0).to(tl.int64)
    b_elements = tl.where(b_request < bs, b_rows * (b_prefix + b_rows), 0)
    start = tl.sum(tl.where(b_request < i_request, b_elements, 0), axis=0)
    prefix = tl.sum(tl.where(b_request == i_request, b_prefix, 0), axis=0)
    rows = tl.sum(tl.where(b_request == i_request, b_rows, 0), axis=0)
    if i_node == 0:
        tl.store(p_indptr + i_request + 1, start + rows * (prefix + rows))
        if i_request == 0:
            tl.store(p_indptr, start)
    if i_node < rows:
        start += i_node * (prefix + rows)
        p_row = p_tree_mask + (i_request.to(tl.int64) * BUCKET + i_node) * BUCKET
        for first in range(0, prefix + rows, BLOCK_C):
            b_column = first + tl.arange(0, BLOCK_C)
            b_tree = (b_column >= prefix) & (b_column < prefix + rows)
            b_seen = tl.load(p_row + b_column - prefix, mask=b_tree, other=1)
            b_inside = (b_column < prefix + rows) & (start + b_column < capacity)
            tl.store(p_mask + start + b_column, b_seen, mask=b_inside)


def full_mask(
    tree_mask: Tensor,
    prefix_lens: Tensor,
    *,
    capacity: int,
    counts: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As c2t_kernels.full_mask, in one launch; elements past indptr[-1] are left as they are.

    tree_mask: contiguous. out: (capacity,) bool.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices and strides.
    """
    check_tensor("full_mask: tree_mask", tree_mask, dtype=torch.bool, shape=(None, None, None))
    bs, bucket, device = tree_mask.shape[0], tree_mask.shape[1], tree_mask.device
    if tree_mask.shape[2] != bucket or not tree_mask.is_contiguous():
        raise ValueError(f"full_mask: tree_mask must be contiguous (bs, n, n), got {tuple(tree_mask.shape)}")
    check_int("full_mask: requests", bs, 1, MAX_REQUESTS)
    check_int("full_mask: capacity", capacity, 1)
    check_tensor("full_mask: prefix_lens", prefix_lens, dtype=INTEGERS, shape=(bs,), device=device)
    if counts is not None:
        check_tensor("full_mask: counts", counts, dtype=torch.int32, shape=(bs,), device=device)
    out = output("full_mask: out", out, (capacity,), torch.bool, device)
    indptr = torch.empty(bs + 1, dtype=torch.int64, device=device)
    full_mask_kernel[(bs, bucket)](
        tree_mask.view(torch.uint8),
        prefix_lens,
        counts,
        out.view(torch.uint8),
        indptr,
        bs,
        capacity,
        BUCKET=bucket,
        BLOCK_B=max(FEWEST_REQUESTS, triton.next_power_of_2(bs)),
        BLOCK_C=BLOCK_C,
    )
    return out, indptr
