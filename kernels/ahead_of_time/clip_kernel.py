"""Launches of c2t_kernels.clip.kernel that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration, signature_of
from c2t_kernels.clip.kernel import blocks, clip_trees_kernel


def _configuration(name: str, bs: int, columns: int) -> Configuration:
    constants, num_warps = blocks(bs, columns)
    kinds = {"p_keep": "*u8", "p_clipped": "*u8", "p_sizes": "*i32"}
    signature = signature_of(clip_trees_kernel, constants, kinds)
    return Configuration(clip_trees_kernel, name, signature, constants, num_warps)


CONFIGURATIONS = (
    # top-k 4 and depth 5, then 8 and 6
    _configuration("trees_4x68", 4, 68),
    _configuration("trees_16x68", 16, 68),
    _configuration("trees_64x68", 64, 68),
    _configuration("trees_4x328", 4, 328),
)
