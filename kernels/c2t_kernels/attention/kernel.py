"""Attention for verification shapes: few nodes per request, a long paged prefix, a tree mask over the new nodes.

One program takes a tile of (node, query head of one key/value head) rows, so that the prefix is read once per key/value
head and not once per query head. It reads its share of the prefix without any mask, and then, if its share is the last
one, the blocks of the request's own nodes that hold something. Shares are combined by a second kernel.

A captured launch has room for a request of each row, and most replays have fewer. A program of no request would still
wait for a multiprocessor, so there are programs for as many requests as run at a time, and each takes more in turn.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.attention.arguments import check
from c2t_kernels.attention.split import SLOTS, Launch, combine, default_launch, requests_at_a_time
from c2t_kernels.checks import check_int, output


@triton.jit
def _attend(b_q, b_k, b_v, b_seen, scale_log2, b_max, b_sum, b_acc):
    """One step of the online softmax in base 2: fold the keys of one block into the running maximum, sum and output."""
    b_score = tl.dot(b_q, b_k, input_precision="ieee") * scale_log2
    b_score = tl.where(b_seen, b_score, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_score, 1))
    # a row that has seen nothing yet would compute -inf - -inf
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_weight = tl.exp2(b_score - b_base[:, None])
    b_decay = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
    b_acc = b_acc * b_decay[:, None] + tl.dot(b_weight.to(b_v.dtype), b_v, input_precision="ieee")
    return b_new_max, b_sum, b_acc


# captured for many sizes of batch, which are not worth a compiled form each
@triton.jit(do_not_specialize=["requests"])
def tree_attention_kernel(
    p_q, p_k_new, p_v_new, p_k_pool, p_v_pool, p_cu_nodes, p_kv_indptr, p_kv_indices, p_mask, p_mask_indptr,
    p_out, p_partial, p_partial_lse, scale_log2, requests, heads, splits,
    q_row, q_head, k_new_row, k_new_head, v_new_row, v_new_head, k_pool_row, k_pool_head, v_pool_row, v_pool_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    # grid: (tiles, key/value heads x splits, requests at a time); tiles of one share run side by side and meet in L2
    i_tile = tl.program_id(0)
    i_kv_head = tl.program_id(1) // splits
    i_split = tl.program_id(1) % splits
    b_dim = tl.arange(0, HEAD_DIM)
    b_key = tl.arange(0, BLOCK_KEYS)

    # slots up to the last request that has a node
    rows = tl.load(p_cu_nodes + requests)
    slots = 0
    for start in range(0, requests, SLOTS):
        b_slot = start + tl.arange(0, SLOTS)
        b_first = tl.load(p_cu_nodes + b_slot, mask=b_slot < requests, other=0)
        slots += tl.sum(((b_slot < requests) & (b_first < rows)).to(tl.int32), 0)
    for i_request in tl.range(tl.program_id(2), slots, tl.num_programs(2), disable_licm=True):
        first_row = tl.load(p_cu_nodes + i_request).to(tl.int64)
        nodes = (tl.load(p_cu_nodes + i_request + 1) - first_row).to(tl.int32)
        is_live = i_tile * BLOCK_ROWS < nodes * GROUP
        first_kv = tl.load(p_kv_indptr + i_request).to(tl.int64)
        prefix = tl.where(is_live, tl.load(p_kv_indptr + i_request + 1) - first_kv, 0).to(tl.int32)

        b_row = i_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        b_node = b_row // GROUP
        b_head = i_kv_head * GROUP + b_row % GROUP
        b_live = b_node < nodes
        at_q = (first_row + b_node) * q_row + b_head.to(tl.int64) * q_head
        b_q = tl.load(p_q + at_q[:, None] + b_dim[None, :], mask=b_live[:, None], other=0.0)

        b_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        b_acc = tl.zeros([BLOCK_ROWS, HEAD_DIM], tl.float32)

        # A share below 4 x BLOCK_ROWS keys would move more bytes of partial results than of keys and values.
        share = tl.maximum(
            tl.cdiv(tl.cdiv(prefix, splits), BLOCK_KEYS) * BLOCK_KEYS, max(4 * BLOCK_ROWS, 2 * BLOCK_KEYS)
        )
        begin = tl.minimum(i_split * share, prefix)
        end = tl.minimum(begin + share, prefix)
        k_pool_base = p_k_pool + i_kv_head.to(tl.int64) * k_pool_head
        v_pool_base = p_v_pool + i_kv_head.to(tl.int64) * v_pool_head
        for start in range(begin, end, BLOCK_KEYS):
            b_seen = start + b_key < end
            b_slot = tl.load(p_kv_indices + first_kv + start + b_key, mask=b_seen, other=0).to(tl.int64)
            b_k = tl.load(k_pool_base + b_slot[None, :] * k_pool_row + b_dim[:, None], mask=b_seen[None, :], other=0.0)
            b_v = tl.load(v_pool_base + b_slot[:, None] * v_pool_row + b_dim[None, :], mask=b_seen[:, None], other=0.0)
            b_max, b_sum, b_acc = _attend(b_q, b_k, b_v, b_seen[None, :], scale_log2, b_max, b_sum, b_acc)

        # The last share is the shortest one, so it takes the new nodes as well.
        new_end = 0
        if is_live & (i_split == splits - 1):
            new_end = nodes
        first_mask = 0
        is_tree = False
        if p_mask is not None:
            first_mask = tl.load(p_mask_indptr + i_request).to(tl.int64)
            is_tree = tl.load(p_mask_indptr + i_request + 1) > first_mask
        if not is_tree:
            # a chain sees nothing after the tile's last node
            new_end = tl.minimum(new_end, ((i_tile + 1) * BLOCK_ROWS - 1) // GROUP + 1)
        k_new_base = p_k_new + i_kv_head.to(tl.int64) * k_new_head
        v_new_base = p_v_new + i_kv_head.to(tl.int64) * v_new_head
        for start in range(0, new_end, BLOCK_KEYS):
            b_column = start + b_key
            b_inside = b_column < nodes
            b_seen = b_live[:, None] & b_inside[None, :]
            if p_mask is not None:
                if is_tree:
                    # one tree's offsets fit in 32 bits, and in registers
                    at_mask = b_node[:, None] * nodes + b_column[None, :]
                    b_seen = tl.load(p_mask + first_mask + at_mask, mask=b_seen, other=0) != 0
                else:
                    b_seen = b_seen & (b_column[None, :] <= b_node[:, None])
            else:
                b_seen = b_seen & (b_column[None, :] <= b_node[:, None])
            # an empty block's keys and values are not read
            if tl.max(tl.max(b_seen.to(tl.int32), 1), 0) > 0:
                b_new = first_row + b_column
                b_k = tl.load(
                    k_new_base + b_new[None, :] * k_new_row + b_dim[:, None], mask=b_inside[None, :], other=0.0
                )
                b_v = tl.load(
                    v_new_base + b_new[:, None] * v_new_row + b_dim[None, :], mask=b_inside[:, None], other=0.0
                )
                b_max, b_sum, b_acc = _attend(b_q, b_k, b_v, b_seen, scale_log2, b_max, b_sum, b_acc)

        b_empty = b_sum == 0.0
        b_total = tl.where(b_empty, 1.0, b_sum)
        b_acc = b_acc / b_total[:, None]
        # read again, which is cheaper than a register for so long: with one more they spill on 8.0
        first_row = tl.load(p_cu_nodes + i_request, volatile=True).to(tl.int64)
        at_out = (first_row + b_node) * heads + b_head
        if p_partial is None:
            p_target = p_out + at_out[:, None] * HEAD_DIM + b_dim[None, :]
            tl.store(p_target, b_acc.to(p_out.dtype.element_ty), mask=b_live[:, None])
        else:
            at_part = at_out * splits + i_split
            b_lse = tl.where(b_empty, float("-inf"), b_max + tl.log2(b_total))
            tl.store(p_partial_lse + at_part, b_lse, mask=b_live)
            # the combining kernel does not read the output of a share without weight
            p_target = p_partial + at_part[:, None] * HEAD_DIM + b_dim[None, :]
            tl.store(p_target, b_acc, mask=(b_live & (b_empty == 0))[:, None])


def tree_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    cu_nodes: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    *,
    scale: float | None = None,
    max_nodes: int | None = None,
    out: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """As c2t_kernels.tree_attention, which explains the shared arguments, for a whole batch in one or two launches.

    Tensors are bfloat16, float16 or (for tests: no launch is made for it) float32, of one dtype, head_dim 64, 128 or
    256; the integer ones are int32 or int64. The last dimension is contiguous, rows and heads have any stride.

    max_nodes: the most nodes that any request has, fixed at capture time; rows of a larger request beyond it stay
        unwritten. None takes the number of rows, which is always enough and starts programs that have nothing to do.
    out: (rows, heads, head_dim) contiguous, q's dtype. Rows from cu_nodes[-1] on stay as they are.
    launch: how the work is cut; None means default_launch, of as many requests as the rows are whole windows of.

    Lengths are read on the device: one captured launch serves every batch of at most this many rows and requests.
    Raises TypeError or ValueError, naming the argument, before anything is launched.
    """
    check(q, k_new, v_new, k_pool, v_pool, cu_nodes, kv_indptr, kv_indices, mask, mask_indptr)
    rows, heads, head_dim = q.shape
    kv_heads, requests = k_new.shape[1], cu_nodes.shape[0] - 1
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"tree_attention: scale must be finite, got {scale}")
    windows = max_nodes is not None
    max_nodes = rows if max_nodes is None else max_nodes
    check_int("tree_attention: max_nodes", max_nodes, 0)
    out = output("tree_attention: out", out, q.shape, q.dtype, q.device)
    if rows == 0 or requests == 0 or max_nodes == 0:
        return out
    # A captured batch has room for as many requests as rows: with fewer whole windows the others have no row.
    filled = min(requests, triton.cdiv(rows, max_nodes)) if windows else requests
    if launch is None:
        launch = default_launch(filled, max_nodes, heads, kv_heads, head_dim)
    split = launch.splits > 1
    partial = torch.empty(rows, heads, launch.splits, head_dim, device=q.device, dtype=torch.float32) if split else None
    partial_lse = torch.empty(rows, heads, launch.splits, device=q.device, dtype=torch.float32) if split else None
    tiles = triton.cdiv(max_nodes * (heads // kv_heads), launch.block_rows)
    shares = kv_heads * launch.splits
    tree_attention_kernel[(tiles, shares, requests_at_a_time(requests, filled, tiles * shares))](
        *(q, k_new, v_new, k_pool, v_pool, cu_nodes, kv_indptr, kv_indices),
        mask.view(torch.uint8) if mask is not None else None,
        *(mask_indptr, out, partial, partial_lse),
        (head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
        *(requests, heads, launch.splits),
        *(stride for tensor in (q, k_new, v_new, k_pool, v_pool) for stride in tensor.stride()[:2]),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=launch.block_rows,
        BLOCK_KEYS=launch.block_keys,
        SLOTS=SLOTS,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if partial is not None and partial_lse is not None:
        combine(partial, partial_lse, cu_nodes, out)
    return out
