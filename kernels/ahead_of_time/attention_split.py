"""Launches of c2t_kernels.attention.split that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration, signature_of
from c2t_kernels.attention.split import MAX_SPLITS, combine_blocks, combine_kernel


def _combine_configuration(head_dim: int, splits: int) -> Configuration:
    """Of 32 query heads."""
    constants = combine_blocks(32, splits, head_dim)
    signature = signature_of(combine_kernel, constants, {"p_cu_nodes": "*i32", "p_out": "*bf16"})
    return Configuration(combine_kernel, f"combine_d{head_dim}_{splits}", signature, constants)


CONFIGURATIONS = tuple(
    _combine_configuration(head_dim, splits) for head_dim in (64, 128, 256) for splits in (2, 8, MAX_SPLITS)
)
