"""Launches of c2t_kernels.spare.kernel that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration, signature_of
from c2t_kernels.spare.kernel import blocks, fill_spare_rows_kernel

# requests and columns: top-k 4 and depth 5, then 8 and 6
TREES = (("trees_4x68", 4, 68), ("trees_16x68", 16, 68), ("trees_64x68", 64, 68), ("trees_4x328", 4, 328))


def _configuration(name: str, bs: int, columns: int) -> Configuration:
    constants, num_warps = blocks(bs, columns, 48)
    kinds = {"p_keep": "*u8", "p_own": "*u8", "p_filled": "*u8", "p_sizes": "*i64"}
    signature = signature_of(fill_spare_rows_kernel, constants, kinds)
    return Configuration(fill_spare_rows_kernel, name, signature, constants, num_warps)


CONFIGURATIONS = tuple(_configuration(*each) for each in TREES)
