"""The surest nodes of a whole batch of trees in one launch: each program counts all keys and writes its own tree's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.checks import check_int, check_tensor
from c2t_kernels.clip.result import ClippedTrees
from c2t_kernels.spare.kernel import MAX_PLACES, best_keys, blocks_of_trees

# Other numbers in each step or server, and addresses within other tensors: none is a kernel of its own.
_VARIES = ("bs", "columns", "most", "room", "keep_stride", "key_stride")


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=("p_keep", "p_key"))
def clip_trees_kernel(
    p_keep,
    p_key,
    p_clipped,
    p_sizes,
    p_surest,
    bs,
    columns,
    most,
    room,
    keep_stride,
    key_stride,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0)
    b_row, b_column = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_N)
    b_inside = (b_row < bs)[:, None] & (b_column < columns)[None, :]
    b_kept = tl.load(p_keep + b_row[:, None] * keep_stride + b_column[None, :], mask=b_inside, other=0) != 0
    b_sure = tl.load(p_key + b_row[:, None] * key_stride + b_column[None, :], mask=b_inside, other=0.0)
    # the bits of floats that are not negative grow with the floats
    b_key = tl.where(b_kept & (b_sure > 0), b_sure.to(tl.int32, bitcast=True), 0)
    b_best = best_keys(b_key, tl.zeros_like(b_row) + room, True)

    b_mine = (b_row == row)[:, None]
    b_clipped = tl.sum((b_mine & b_best).to(tl.int32), axis=0)
    tl.store(p_clipped + row * columns + b_column, b_clipped.to(tl.uint8), mask=b_column < columns)
    tl.store(p_sizes + row, tl.sum(tl.sum((b_mine & b_kept).to(tl.int32), axis=1), axis=0))
    b_falling = tl.sort(tl.sum(tl.where(b_mine, b_key, 0), axis=0), descending=True)
    tl.store(p_surest + row * most + b_column, b_falling.to(tl.float32, bitcast=True), mask=b_column < most)


def clip_trees(keep: Tensor, key: Tensor, most: int, room: int) -> ClippedTrees:
    """As c2t_kernels.clip_trees. Raises ValueError or TypeError for wrong shapes, dtypes, devices and numbers."""
    check_tensor("clip_trees: keep", keep, dtype=torch.bool, shape=(None, None))
    (bs, columns), device = keep.shape, keep.device
    check_tensor("clip_trees: key", key, dtype=torch.float32, shape=(bs, columns), device=device)
    check_int("clip_trees: most", most, 0)
    check_int("clip_trees: room", room, 0)
    constants, num_warps = blocks_of_trees(bs, columns)
    if constants["BLOCK_B"] * constants["BLOCK_N"] > MAX_PLACES:
        from c2t_kernels.clip import reference

        return reference.clip_trees(keep, key, most, room)
    clipped = torch.empty(bs, columns, dtype=torch.bool, device=device)
    sizes = torch.empty(bs, dtype=torch.int32, device=device)
    most = min(most, columns)
    surest = torch.empty(bs, most, dtype=torch.float32, device=device)
    if clipped.numel():
        tensors = keep.view(torch.uint8), key, clipped.view(torch.uint8), sizes, surest
        numbers = bs, columns, most, room, keep.stride(0), key.stride(0)
        clip_trees_kernel[(bs,)](*tensors, *numbers, **constants, num_warps=num_warps)
    return ClippedTrees(clipped, sizes, surest)
