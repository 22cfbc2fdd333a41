"""Launches of c2t_kernels.stats.kernel that are compiled ahead of time."""

from __future__ import annotations

import torch

from ahead_of_time.configuration import Configuration
from c2t_kernels.stats.kernel import SELECT_WARPS, SHIFTS, select_kernel, top_pad
from c2t_kernels.stats.scan import CHUNK, group_size


def _configuration(
    dtype: torch.dtype, word: str, vocab: int, k: int, in_memory: bool, at: bool = False
) -> Configuration:
    """at: each row's result has a place of its own, as seeds have."""
    aligned = ("row_stride", "vocab") if vocab % 16 == 0 else ()
    logits = {"p_logits": f"*{word}", "row_stride": "i32"}
    parts = {"p_partial": "*fp32", "p_group_max": "*fp32"}
    return Configuration(
        select_kernel,
        f"select_{word}_{vocab}_k{k}{'_memory' * in_memory}{'_at' * at}",
        {
            **logits,
            "p_ids": "*i64",
            **{name: "*fp32" for name in ("p_log_probs", "p_entropy", "p_margin")},
            "p_at": "*i64" if at else "constexpr",
            **parts,
            "p_hits": "*i32",
            "p_packed": "*fp32",
            "p_packed_ids": "*i32",
            "top_m": "*i32" if in_memory else "i32",
            "vocab": "i32",
            **{name: "constexpr" for name in ("K", "TOP_PAD", "GROUP", "CHUNK", "SHIFT", "TOP_M_IN_MEMORY")},
        },
        {
            **{"K": k, "TOP_PAD": top_pad(k), "GROUP": group_size(vocab), "CHUNK": CHUNK},
            **{"SHIFT": SHIFTS[dtype], "TOP_M_IN_MEMORY": in_memory},
            **({} if at else {"p_at": None}),
        },
        num_warps=SELECT_WARPS,
        aligned=aligned,
    )


# One per type, and one per group size (1, 4, 16, 32 and 64); the rest differ in k alone.
CONFIGURATIONS = (
    _configuration(torch.bfloat16, "bf16", 128_256, 1, True),
    _configuration(torch.float16, "fp16", 128_256, 1, False),
    _configuration(torch.float32, "fp32", 128_256, 1, True),
    _configuration(torch.float32, "fp32", 1023, 2, False),
    _configuration(torch.bfloat16, "bf16", 32_000, 8, True),
    _configuration(torch.bfloat16, "bf16", 151_936, 32, True),
    _configuration(torch.float32, "fp32", 262_144, 32, False),
    _configuration(torch.bfloat16, "bf16", 262_208, 1, True),
    _configuration(torch.bfloat16, "bf16", 32_000, 1, False, at=True),
    _configuration(torch.bfloat16, "bf16", 151_936, 8, False, at=True),
)
