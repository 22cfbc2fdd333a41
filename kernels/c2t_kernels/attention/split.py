"""How attention over a long prefix is cut into shares for a GPU that a small batch does not fill, and put together."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.checks import check_int

# Two per multiprocessor of an H200 (132 of them): below this a launch leaves memory bandwidth unused.
WANTED_PROGRAMS = 264
MAX_SPLITS = 32
# Numbers of partial results that a program of the combining kernel holds, where one head has no more.
COMBINED = 4096
# Of a batch's slots, how many a program counts in one go.
SLOTS = 128
# (head_dim, block_rows) -> block_keys, num_warps, num_stages: the largest that no GPU generation spills. Triton spends
# every other stage of the pipeline on the slots, so that 5 stages keep two blocks of keys and values, 7 three, 9 four.
BLOCKS = {
    (64, 16): (32, 4, 7),
    (64, 32): (64, 4, 5),
    (64, 64): (32, 4, 7),
    (64, 128): (64, 8, 5),
    (128, 16): (32, 4, 9),
    (128, 32): (64, 4, 5),
    (128, 64): (32, 8, 9),
    (256, 16): (32, 4, 5),
    (256, 32): (32, 8, 5),
}


@dataclass(frozen=True)
class Launch:
    """How a launch is cut: a pure function of shapes unless the caller gives one.

    block_rows: rows of a tile, a row being a node and a query head of one group; 16 to 128.
    block_keys: keys per step; 16 to 128.
    splits: into how many shares a prefix is cut, 1 to 32.
    """

    block_rows: int
    block_keys: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 5

    def __post_init__(self) -> None:
        for name in ("block_rows", "block_keys"):
            if getattr(self, name) not in (16, 32, 64, 128):
                raise ValueError(f"Launch: {name} must be 16, 32, 64 or 128, got {getattr(self, name)}")
        check_int("Launch: splits", self.splits, 1, MAX_SPLITS)


def default_launch(requests: int, max_nodes: int, heads: int, kv_heads: int, head_dim: int) -> Launch:
    """The smallest tile that holds a request's rows of one key/value head, and splits until the GPU is busy."""
    rows = max_nodes * (heads // kv_heads)
    largest = max(block_rows for dim, block_rows in BLOCKS if dim == head_dim)
    block_rows = min(max(16, triton.next_power_of_2(rows)), largest)
    programs = max(1, requests * kv_heads * triton.cdiv(rows, block_rows))
    splits = min(triton.next_power_of_2(triton.cdiv(WANTED_PROGRAMS, programs)), MAX_SPLITS)
    block_keys, num_warps, num_stages = BLOCKS[head_dim, block_rows]
    return Launch(block_rows, block_keys, splits, num_warps, num_stages)


def requests_at_a_time(requests: int, filled: int, programs: int) -> int:
    """Of a batch's slots, those filled at least, and more while the GPU is not busy. programs: of one request."""
    return min(requests, max(filled, WANTED_PROGRAMS // programs))


@triton.jit
def combine_kernel(
    p_partial, p_partial_lse, p_cu_nodes, p_out, requests, heads, splits,
    HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    # grid: (rows, blocks of heads)
    i_row = tl.program_id(0)
    if i_row >= tl.load(p_cu_nodes + requests):
        return
    b_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    b_split = tl.arange(0, BLOCK_SPLITS)
    b_dim = tl.arange(0, HEAD_DIM)
    b_live = b_head < heads
    b_at = i_row.to(tl.int64) * heads + b_head
    b_share = b_at[:, None] * splits + b_split[None, :]
    b_inside = b_live[:, None] & (b_split[None, :] < splits)
    b_lse = tl.load(p_partial_lse + b_share, mask=b_inside, other=float("-inf"))
    b_used = b_lse > float("-inf")
    b_largest = tl.max(b_lse, 1)
    b_weight = tl.exp2(b_lse - tl.where(b_largest == float("-inf"), 0.0, b_largest)[:, None])
    p_source = p_partial + b_share[:, :, None] * HEAD_DIM + b_dim[None, None, :]
    b_part = tl.load(p_source, mask=b_used[:, :, None], other=0.0)
    b_total = tl.sum(b_weight, 1)
    b_out = tl.sum(b_part * b_weight[:, :, None], 1) / tl.where(b_total == 0.0, 1.0, b_total)[:, None]
    p_target = p_out + b_at[:, None] * HEAD_DIM + b_dim[None, :]
    tl.store(p_target, b_out.to(p_out.dtype.element_ty), mask=b_live[:, None])


def combine_blocks(heads: int, splits: int, head_dim: int) -> dict[str, int]:
    """As many heads of a row in one program as keep its table of shares at 4,096 numbers, or one."""
    block_splits = triton.next_power_of_2(splits)
    block_heads = min(triton.next_power_of_2(heads), max(1, COMBINED // (block_splits * head_dim)))
    return {"HEAD_DIM": head_dim, "BLOCK_HEADS": block_heads, "BLOCK_SPLITS": block_splits}


def combine(partial: Tensor, partial_lse: Tensor, cu_nodes: Tensor, out: Tensor) -> None:
    """Weigh the shares' outputs by their sums of exponentials, into out.

    partial: (rows, heads, splits, head_dim) float32, each share's own softmax average; not read where its lse is -inf.
    partial_lse: (rows, heads, splits) float32, base-2 logarithm of each share's sum of exponentials.
    cu_nodes: (requests + 1,) integer; rows from its last entry on are left alone.
    out: (rows, heads, head_dim) contiguous; a row whose shares are all empty is 0.
    """
    rows, heads, splits, head_dim = partial.shape
    blocks = combine_blocks(heads, splits, head_dim)
    combine_kernel[(rows, triton.cdiv(heads, blocks["BLOCK_HEADS"]))](
        partial, partial_lse, cu_nodes, out, cu_nodes.shape[0] - 1, heads, splits, **blocks
    )
