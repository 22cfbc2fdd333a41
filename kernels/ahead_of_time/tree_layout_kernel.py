"""Launches of c2t_kernels.tree_layout.kernel that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration
from c2t_kernels.tree_layout.kernel import _blocks, _warps, build_tree_kernel


def _tree(name: str, slots: int, bucket: int) -> Configuration:
    words = ("p_draft_tokens", "p_positions", "p_retrieve_index", "p_next_token", "p_next_sibling")
    blocks = _blocks(slots, bucket)
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
    _tree("tree_8", 30, 8),
    _tree("tree_64", 510, 64),
    _tree("tree_256", 1024, 256),
    _tree("tree_512", 2048, 512),
    _tree("tree_1024", 4096, 1024),
)
