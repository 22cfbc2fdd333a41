"""Launches of c2t_kernels.tree_layout.kernel that are compiled ahead of time."""

from __future__ import annotations

from c2t_kernels.tree_layout.kernel import _blocks, _warps, build_tree_kernel
from c2t_kernels.tree_layout.reference import ORDERS
from tests.support.kernels.configuration import Configuration


def _tree(name: str, slots: int, bucket: int, order: str) -> Configuration:
    words = ("p_draft_tokens", "p_positions", "p_retrieve_index", "p_next_token", "p_next_sibling")
    blocks = _blocks(slots, bucket, order)
    signature = {
        **{"p_parent_ids": "*i32", "p_keep": "*u8", "p_token_ids": "*i64", "p_root_tokens": "*i64"},
        **{"p_prefix_lens": "*i64", "p_scratch": "*i32"},
        **dict.fromkeys(words, "*i64"),
        **{"p_parents": "*i32", "p_slots": "*i32", "p_counts": "*i32", "p_mask": "*u8"},
        **dict.fromkeys(("parent_stride", "keep_stride", "token_stride"), "i32"),
        **dict.fromkeys(blocks, "constexpr"),
    }
    return Configuration(build_tree_kernel, name, signature, blocks, _warps(bucket))


CONFIGURATIONS = (
    *(_tree(f"tree_64_{order}", 510, 64, order) for order in ORDERS),
    _tree("tree_8", 30, 8, "insertion"),
    _tree("tree_256_heavy_path", 1024, 256, "heavy_path"),
    _tree("tree_512_heavy_path", 2048, 512, "heavy_path"),
    _tree("tree_1024_heavy_path", 4096, 1024, "heavy_path"),
)
