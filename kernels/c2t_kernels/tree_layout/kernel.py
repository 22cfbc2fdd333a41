"""Kept nodes of every request to the tensors of verification: one program lays out one tree."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.checks import INTEGERS, check_int, check_tensor
from c2t_kernels.tree_layout.result import TreeLayout

MAX_BUCKET = 1024
MAX_SLOTS = 4096
BLOCK_FILL = 1024


@triton.jit
def build_tree_kernel(
    p_parent_ids,
    p_keep,
    p_token_ids,
    p_root_tokens,
    p_prefix_lens,
    p_scratch,
    p_draft_tokens,
    p_positions,
    p_retrieve_index,
    p_next_token,
    p_next_sibling,
    p_parents,
    p_slots,
    p_counts,
    p_mask,
    parent_stride,
    keep_stride,
    token_stride,
    SLOTS: tl.constexpr,
    BUCKET: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
):
    i_request = tl.program_id(0).to(tl.int64)
    p_place_of = p_scratch + i_request * SLOTS
    p_tree_mask = p_mask + i_request * BUCKET * BUCKET
    row = i_request * BUCKET

    b_slot = tl.arange(0, BLOCK_S)
    b_inside = b_slot < SLOTS
    b_keep = tl.load(p_keep + i_request * keep_stride + b_slot, mask=b_inside, other=0) != 0
    b_at = tl.cumsum(b_keep.to(tl.int32), axis=0)
    b_taken = b_keep & (b_at < BUCKET)
    count = 1 + tl.sum(b_taken.to(tl.int32), axis=0)
    tl.store(p_counts + i_request, count)
    tl.store(p_place_of + b_slot, b_at, mask=b_inside)
    for first in range(0, BUCKET * BUCKET, BLOCK_FILL):
        b_element = first + tl.arange(0, BLOCK_FILL)
        tl.store(p_tree_mask + b_element, 0, mask=b_element < BUCKET * BUCKET)
    tl.debug_barrier()

    # A parent that does not come before its child would make the walks below endless: such a node hangs on the root.
    b_parent_slot = tl.load(p_parent_ids + i_request * parent_stride + b_slot, mask=b_taken, other=-1)
    b_linked = b_taken & (b_parent_slot >= 0) & (b_parent_slot < b_slot)
    b_above = tl.load(p_place_of + b_parent_slot, mask=b_linked, other=0)
    b_token = tl.load(p_token_ids + i_request * token_stride + b_slot, mask=b_taken, other=0)
    tl.store(p_draft_tokens + row + b_at, b_token, mask=b_taken)
    tl.store(p_slots + row + b_at, b_slot, mask=b_taken)
    tl.store(p_parents + row + b_at, b_above, mask=b_taken)
    b_node = tl.arange(0, BLOCK_N)
    b_place = b_node < BUCKET
    b_other = b_place & ((b_node == 0) | (b_node >= count))
    b_root_token = tl.where(b_node == 0, tl.load(p_root_tokens + i_request), 0)
    tl.store(p_draft_tokens + row + b_node, b_root_token, mask=b_other)
    tl.store(p_slots + row + b_node, tl.where(b_node == 0, -1, -2), mask=b_other)
    tl.store(p_parents + row + b_node, -1, mask=b_other)
    tl.store(p_retrieve_index + row + b_node, row + b_node, mask=b_place)
    tl.debug_barrier()

    b_depth = tl.full((BLOCK_N,), -1, tl.int32)
    b_current = tl.where(b_place, b_node, -1)
    while tl.max(b_current, axis=0) >= 0:
        b_walking = b_current >= 0
        b_depth += b_walking.to(tl.int32)
        tl.store(p_tree_mask + b_node * BUCKET + b_current, 1, mask=b_walking)
        b_current = tl.load(p_parents + row + b_current, mask=b_walking, other=-1)
    tl.store(p_positions + row + b_node, tl.load(p_prefix_lens + i_request).to(tl.int64) + b_depth, mask=b_place)

    b_parent = tl.load(p_parents + row + b_node, mask=b_place, other=-1)
    b_child = tl.full((BLOCK_N,), BLOCK_N, tl.int32)
    b_sibling = tl.full((BLOCK_N,), BLOCK_N, tl.int32)
    for first in range(0, count, TILE):
        b_later = first + tl.arange(0, TILE)
        b_later_parent = tl.load(p_parents + row + b_later, mask=b_later < count, other=-1)
        b_found = tl.where(b_later_parent[None, :] == b_node[:, None], b_later[None, :], BLOCK_N)
        b_child = tl.minimum(b_child, tl.min(b_found, axis=1))
        b_same = (b_later_parent[None, :] == b_parent[:, None]) & (b_parent[:, None] >= 0)
        b_found = tl.where(b_same & (b_later[None, :] > b_node[:, None]), b_later[None, :], BLOCK_N)
        b_sibling = tl.minimum(b_sibling, tl.min(b_found, axis=1))
    tl.store(p_next_token + row + b_node, tl.where(b_child < BLOCK_N, b_child, -1), mask=b_place)
    tl.store(p_next_sibling + row + b_node, tl.where(b_sibling < BLOCK_N, b_sibling, -1), mask=b_place)


def build_tree(
    parent_ids: Tensor,
    keep: Tensor,
    token_ids: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor,
    *,
    bucket: int,
) -> TreeLayout:
    """As c2t_kernels.build_tree, in one launch.

    parent_ids, token_ids, root_tokens, prefix_lens: int32 or int64. Tables may have rows of any stride.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices and strides, a bucket above MAX_BUCKET or more than
    MAX_SLOTS slots. A keep that is not closed under ancestors is not detected, and its layout has no meaning.
    """
    check_tensor("build_tree: keep", keep, dtype=torch.bool, shape=(None, None))
    (bs, slots), device = keep.shape, keep.device
    check_int("build_tree: slots of keep", slots, 1, MAX_SLOTS)
    check_int("build_tree: bucket", bucket, 1, MAX_BUCKET)
    for name, table in (("parent_ids", parent_ids), ("token_ids", token_ids)):
        check_tensor(f"build_tree: {name}", table, dtype=INTEGERS, shape=(bs, slots), device=device)
    for name, column in (("root_tokens", root_tokens), ("prefix_lens", prefix_lens)):
        check_tensor(f"build_tree: {name}", column, dtype=INTEGERS, shape=(bs,), device=device)
    made = _layout(bs, bucket, device)
    if bs == 0:
        return made
    build_tree_kernel[(bs,)](
        parent_ids,
        keep.view(torch.uint8),
        token_ids,
        root_tokens,
        prefix_lens,
        torch.empty((bs, slots), dtype=torch.int32, device=device),
        *made[:-1],
        made.mask.view(torch.uint8),
        parent_ids.stride(0),
        keep.stride(0),
        token_ids.stride(0),
        **_blocks(slots, bucket),
        num_warps=_warps(bucket),
    )
    return made


def _layout(bs: int, bucket: int, device: torch.device) -> TreeLayout:
    """Without content."""
    small = {"parents": torch.int32, "slots": torch.int32, "counts": torch.int32, "mask": torch.bool}
    shapes: dict[str, tuple[int, ...]] = {"counts": (bs,), "mask": (bs, bucket, bucket)}
    made = {
        name: torch.empty(shapes.get(name, (bs, bucket)), dtype=small.get(name, torch.int64), device=device)
        for name in TreeLayout._fields
    }
    return TreeLayout(**made)


def _blocks(slots: int, bucket: int) -> dict[str, int]:
    return {
        "SLOTS": slots,
        "BUCKET": bucket,
        "BLOCK_S": triton.next_power_of_2(slots),
        "BLOCK_N": triton.next_power_of_2(bucket),
        # Nodes that all others are compared with at a time: the table of both has to fit in registers.
        "TILE": 16 if bucket <= 128 else 8 if bucket <= 256 else 4,
        "BLOCK_FILL": BLOCK_FILL,
    }


def _warps(bucket: int) -> int:
    return 4 if bucket <= 128 else 8 if bucket <= 512 else 16
