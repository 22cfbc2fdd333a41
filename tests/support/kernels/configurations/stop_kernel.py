"""Launches of c2t_kernels.stop.kernel that are compiled ahead of time."""

from __future__ import annotations

import triton

from c2t_kernels.stop.kernel import _block, early_stop_kernel
from tests.support.kernels.configuration import Configuration


def _configuration(name: str, links: str, *, bs: int, d_max: int, together: bool) -> Configuration:
    block_d = triton.next_power_of_2(d_max)
    block_b, num_warps = _block(bs, block_d, together)
    tokens = {"p_budget": "*i32", "p_tiers": "*i32"} if together else {"p_budget": "constexpr", "p_tiers": "constexpr"}
    sizes = ("bs", "confidence_stride", "beta_stride", "max_depth_stride", "next_token_stride")
    constants = {
        **({} if together else {"p_budget": None, "p_tiers": None}),
        **{"D_MAX": d_max, "WIDTH": d_max + 1, "N_TIERS": 16 if together else 0, "BLOCK_B": block_b},
        **{"BLOCK_D": block_d, "BLOCK_W": triton.next_power_of_2(d_max + 1), "BLOCK_T": 16 if together else 1},
    }
    signature = {
        **{"p_confidence": "*fp32", "p_beta": "*fp32", "p_max_depth": "*i32"},
        **tokens,
        **{"p_next_token": links, "p_lengths": "*i32"},
        **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(("D_MAX", "WIDTH", "N_TIERS", "BLOCK_B", "BLOCK_D", "BLOCK_W", "BLOCK_T"), "constexpr"),
    }
    return Configuration(early_stop_kernel, name, signature, constants, num_warps)


CONFIGURATIONS = (
    _configuration("each_row", "*i64", bs=256, d_max=5, together=False),
    _configuration("each_row_deep", "*i64", bs=512, d_max=16, together=False),
    _configuration("batch_16x4", "*i64", bs=16, d_max=4, together=True),
    # as many elements as 8 warps are for
    _configuration("batch_128x8", "*i64", bs=128, d_max=8, together=True),
    _configuration("batch_256x5", "*i64", bs=256, d_max=5, together=True),
    _configuration("batch_512x16", "*i64", bs=512, d_max=16, together=True),
)
