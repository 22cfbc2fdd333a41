"""Launches of c2t_kernels.attention.kernel that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration
from c2t_kernels.attention.kernel import tree_attention_kernel
from c2t_kernels.attention.split import BLOCKS, SLOTS, Launch


def _configuration(dtype: str, head_dim: int, launch: Launch, tree: bool = True) -> Configuration:
    """One launch of tree_attention_kernel, groups of 4 query heads, contiguous tensors, int32 indices."""
    split = launch.splits > 1
    kinds = {
        "p_mask": "*u8" if tree else "constexpr",
        "p_mask_indptr": "*i32" if tree else "constexpr",
        "p_partial": "*fp32" if split else "constexpr",
        "p_partial_lse": "*fp32" if split else "constexpr",
        "scale_log2": "fp32",
    }
    indices = ("p_cu_nodes", "p_kv_indptr", "p_kv_indices")
    constants = {"GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_ROWS": launch.block_rows, "BLOCK_KEYS": launch.block_keys}
    constants["SLOTS"] = SLOTS
    signature = {}
    for name in tree_attention_kernel.arg_names:
        other = "*i32" if name in indices else f"*{dtype}" if name.startswith("p_") else "i32"
        signature[name] = kinds.get(name, "constexpr" if name in constants else other)
    given = {name: constants.get(name) for name, kind in signature.items() if kind == "constexpr"}
    strides = tuple(name for name in signature if name.endswith(("_row", "_head")) and not name.startswith("p_"))
    kind = f"{'tree' if tree else 'chain'}_{'split' if split else 'whole'}"
    name = f"attention_{kind}_{dtype}_d{head_dim}_{launch.block_rows}x{launch.block_keys}"
    return Configuration(
        tree_attention_kernel, name, signature, given, launch.num_warps, launch.num_stages, aligned=strides
    )


def _default(head_dim: int, block_rows: int, splits: int = 1) -> Launch:
    block_keys, num_warps, num_stages = BLOCKS[head_dim, block_rows]
    return Launch(block_rows, block_keys, splits, num_warps, num_stages)


CONFIGURATIONS = (
    # every tile of default_launch; writing the output itself takes more registers than writing a share
    *(_configuration("bf16", head_dim, _default(head_dim, block_rows)) for head_dim, block_rows in BLOCKS),
    *(_configuration("bf16", 128, _default(128, rows, splits=8)) for rows in (16, 64)),
    *(_configuration("bf16", 128, _default(128, rows), tree=False) for rows in (16, 32)),
    _configuration("bf16", 128, _default(128, 16, splits=8), tree=False),
    _configuration("fp16", 128, _default(128, 64)),
    # the blocks of DySpec's table 5
    _configuration("bf16", 128, Launch(32, 32)),
)
