"""Launches of c2t_kernels.attention.split that are compiled ahead of time."""

from __future__ import annotations

from c2t_kernels.attention.split import MAX_SPLITS, combine_kernel
from tests.support.kernels.configuration import Configuration


def _combine_configuration(head_dim: int) -> Configuration:
    kinds = {"p_out": "*bf16", "requests": "i32", "splits": "i32", "HEAD_DIM": "constexpr", "BLOCK_SPLITS": "constexpr"}
    signature = {"p_partial": "*fp32", "p_partial_lse": "*fp32", "p_cu_nodes": "*i32", **kinds}
    constants = {"HEAD_DIM": head_dim, "BLOCK_SPLITS": MAX_SPLITS}
    return Configuration(combine_kernel, f"combine_d{head_dim}", signature, constants)


CONFIGURATIONS = tuple(_combine_configuration(head_dim) for head_dim in (64, 128, 256))
