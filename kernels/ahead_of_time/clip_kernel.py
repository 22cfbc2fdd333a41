"""Launches of c2t_kernels.clip.kernel that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration, signature_of
from ahead_of_time.spare_kernel import TREES
from c2t_kernels.clip.kernel import clip_trees_kernel
from c2t_kernels.spare.kernel import blocks_of_trees


def _configuration(name: str, bs: int, columns: int) -> Configuration:
    constants, num_warps = blocks_of_trees(bs, columns)
    kinds = {"p_keep": "*u8", "p_clipped": "*u8", "p_sizes": "*i32"}
    signature = signature_of(clip_trees_kernel, constants, kinds)
    return Configuration(clip_trees_kernel, name, signature, constants, num_warps)


CONFIGURATIONS = tuple(_configuration(*each) for each in TREES)
