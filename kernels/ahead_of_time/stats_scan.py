"""Launches of c2t_kernels.stats.scan that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration
from c2t_kernels.stats.scan import CHUNK, NUM_WARPS, group_size, scan_kernel


def _configuration(word: str, vocab: int) -> Configuration:
    return Configuration(
        scan_kernel,
        f"scan_{word}_{vocab}",
        {
            **{"p_logits": f"*{word}", "row_stride": "i32", "p_partial": "*fp32", "p_group_max": "*fp32"},
            **{"vocab": "i32", "GROUP": "constexpr", "CHUNK": "constexpr"},
        },
        {"GROUP": group_size(vocab), "CHUNK": CHUNK},
        num_warps=NUM_WARPS,
        aligned=("row_stride", "vocab") if vocab % 16 == 0 else (),
    )


# One per type, and one per group size (1, 4, 16, 32 and 64).
CONFIGURATIONS = (
    _configuration("bf16", 128_256),
    _configuration("fp16", 128_256),
    _configuration("fp32", 128_256),
    _configuration("fp32", 1023),
    _configuration("bf16", 32_000),
    _configuration("bf16", 151_936),
    _configuration("fp32", 262_144),
    _configuration("bf16", 262_208),
)
