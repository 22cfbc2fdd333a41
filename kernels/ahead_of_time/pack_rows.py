"""Launches of c2t_kernels.pack.rows that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration
from c2t_kernels.pack.rows import _block, pack_rows_kernel, scatter_rows_kernel


def _rows(kernel: object, name: str, dtype: str, hidden: int) -> Configuration:
    block_h, num_warps = _block(hidden)
    blocks = {"BLOCK_H": block_h}
    arguments: tuple[str, ...]
    if kernel is pack_rows_kernel:
        arguments = (
            "p_source",
            "p_packed",
            "p_cu_seqlens",
            "pad",
            "request_stride",
            "row_stride",
            "bs",
            "width",
            "hidden",
        )
    else:
        arguments = ("p_packed", "p_strided", "p_cu_seqlens", "fill", "packed_stride", "width", "hidden")
    kinds = {"p_cu_seqlens": "*i32", "pad": "fp32", "fill": "fp32"}
    signature = {
        **{a: kinds.get(a, f"*{dtype}" if a.startswith("p_") else "i32") for a in arguments},
        **dict.fromkeys(blocks, "constexpr"),
    }
    aligned = ("hidden", "request_stride", "row_stride", "packed_stride")
    return Configuration(
        kernel, name, signature, blocks, num_warps, aligned=tuple(a for a in aligned if a in arguments)
    )


CONFIGURATIONS = (
    _rows(pack_rows_kernel, "pack_bf16", "bf16", 4096),
    _rows(pack_rows_kernel, "pack_fp32", "fp32", 128256),
    _rows(scatter_rows_kernel, "scatter_bf16", "bf16", 4096),
    _rows(scatter_rows_kernel, "scatter_fp32", "fp32", 128256),
)
