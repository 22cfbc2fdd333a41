"""Launches of c2t_kernels.pack.wide that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.pack_rows import rows_of
from c2t_kernels.pack.wide import pack_rows_kernel

PACK = ("p_source", "p_packed", "p_cu_seqlens", "pad", "request_stride", "row_stride", "bs", "width", "hidden")
CONFIGURATIONS = (
    rows_of(pack_rows_kernel, "pack_bf16", "bf16", 4096, PACK),
    rows_of(pack_rows_kernel, "pack_fp32", "fp32", 128256, PACK),
)
