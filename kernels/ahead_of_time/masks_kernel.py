"""Launches of c2t_kernels.masks.kernel that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration
from c2t_kernels.masks.kernel import BLOCK_C, full_mask_kernel


def _full(name: str, bs: int, bucket: int, *, ragged: bool) -> Configuration:
    blocks: dict[str, int | None] = {"BUCKET": bucket, "BLOCK_B": bs, "BLOCK_C": BLOCK_C}
    signature = {
        **{"p_tree_mask": "*u8", "p_prefix_lens": "*i64", "p_counts": "*i32" if ragged else "constexpr"},
        **{"p_mask": "*u8", "p_indptr": "*i64", "bs": "i32", "capacity": "i32"},
        **dict.fromkeys(blocks, "constexpr"),
    }
    return Configuration(full_mask_kernel, name, signature, blocks if ragged else {**blocks, "p_counts": None})


CONFIGURATIONS = (
    _full("full_mask_uniform", 64, 64, ragged=False),
    _full("full_mask_ragged", 256, 64, ragged=True),
)
