"""What a tile of queries attends to, a block of keys at a time: a share of the prefix, then the request's own nodes.

Parts of `kernel.py` that it inlines. b_max, b_sum, b_acc are the running maximum, sum and output of each row.
"""

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit
def attend_prefix(
    b_q,
    p_k,
    p_v,
    p_slots,
    k_row,
    v_row,
    begin,
    end,
    scale_log2,
    b_max,
    b_sum,
    b_acc,
    HEAD_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """A share of the pool, from token begin to end. p_k, p_v: of this key/value head. p_slots: of the request."""
    b_dim = tl.arange(0, HEAD_DIM)
    for start in range(begin, end, BLOCK_KEYS):
        b_key = start + tl.arange(0, BLOCK_KEYS)
        b_seen = b_key < end
        b_slot = tl.load(p_slots + b_key, mask=b_seen, other=0).to(tl.int64)
        b_k = tl.load(p_k + b_slot[None, :] * k_row + b_dim[:, None], mask=b_seen[None, :], other=0.0)
        b_v = tl.load(p_v + b_slot[:, None] * v_row + b_dim[None, :], mask=b_seen[:, None], other=0.0)
        b_max, b_sum, b_acc = _attend(b_q, b_k, b_v, b_seen[None, :], scale_log2, b_max, b_sum, b_acc)
    return b_max, b_sum, b_acc


@triton.jit
def attend_nodes(
    b_q,
    p_k,
    p_v,
    p_mask,
    k_row,
    v_row,
    nodes,
    new_end,
    b_node,
    is_tree,
    scale_log2,
    b_max,
    b_sum,
    b_acc,
    HEAD_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """The request's own nodes up to new_end. p_k, p_v: its first node's, of this head. p_mask: its tree's, or None."""
    b_dim = tl.arange(0, HEAD_DIM)
    for start in range(0, new_end, BLOCK_KEYS):
        b_column = start + tl.arange(0, BLOCK_KEYS)
        b_inside = b_column < nodes
        b_seen = (b_node < nodes)[:, None] & b_inside[None, :]
        if p_mask is not None:
            if is_tree:
                # one tree's offsets fit in 32 bits, and in registers
                b_seen = tl.load(p_mask + b_node[:, None] * nodes + b_column[None, :], mask=b_seen, other=0) != 0
            else:
                b_seen = b_seen & (b_column[None, :] <= b_node[:, None])
        else:
            b_seen = b_seen & (b_column[None, :] <= b_node[:, None])
        # an empty block's keys and values are not read
        if tl.max(tl.max(b_seen.to(tl.int32), 1), 0) > 0:
            b_new = b_column.to(tl.int64)
            b_k = tl.load(p_k + b_new[None, :] * k_row + b_dim[:, None], mask=b_inside[None, :], other=0.0)
            b_v = tl.load(p_v + b_new[:, None] * v_row + b_dim[None, :], mask=b_inside[:, None], other=0.0)
            b_max, b_sum, b_acc = _attend(b_q, b_k, b_v, b_seen, scale_log2, b_max, b_sum, b_acc)
    return b_max, b_sum, b_acc
