"""Launches of c2t_kernels.pack.rows that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration
from c2t_kernels.pack.rows import block_of, scatter_rows_kernel

ALIGNED = ("hidden", "request_stride", "row_stride", "packed_stride")
KINDS = {"p_cu_seqlens": "*i32", "pad": "fp32", "fill": "fp32"}


def rows_of(kernel: object, name: str, dtype: str, hidden: int, arguments: tuple[str, ...]) -> Configuration:
    """Of a kernel that copies rows of so many numbers. arguments: its own, but the block."""
    block_h, num_warps = block_of(hidden)
    signature = {a: KINDS.get(a, f"*{dtype}" if a.startswith("p_") else "i32") for a in arguments}
    blocks = {"BLOCK_H": block_h}
    aligned = tuple(a for a in ALIGNED if a in arguments)
    return Configuration(
        kernel, name, signature | dict.fromkeys(blocks, "constexpr"), blocks, num_warps, aligned=aligned
    )


SCATTER = ("p_packed", "p_strided", "p_cu_seqlens", "fill", "packed_stride", "width", "hidden")
CONFIGURATIONS = (
    rows_of(scatter_rows_kernel, "scatter_bf16", "bf16", 4096, SCATTER),
    rows_of(scatter_rows_kernel, "scatter_fp32", "fp32", 128256, SCATTER),
)
