"""Launches of c2t_kernels.stop.kernel that are compiled ahead of time."""

from __future__ import annotations

import triton

from c2t_kernels.stop.kernel import _block, early_stop_kernel
from tests.support.kernels.configuration import Configuration


def _configuration(name: str, *, bs: int, d_max: int, together: bool) -> Configuration:
    block_d = triton.next_power_of_2(d_max)
    block_b, num_warps = _block(bs, block_d, together)
    sizes = ("bs", "confidence_stride", "beta_stride", "max_depth_stride")
    constants = {
        **({} if together else {"p_budget": None}),
        **{"D_MAX": d_max, "BLOCK_B": block_b, "BLOCK_D": block_d},
    }
    signature = {
        **{"p_confidence": "*fp32", "p_beta": "*fp32", "p_max_depth": "*i32"},
        **{"p_budget": "*i32" if together else "constexpr", "p_lengths": "*i32"},
        **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(("D_MAX", "BLOCK_B", "BLOCK_D"), "constexpr"),
    }
    return Configuration(early_stop_kernel, name, signature, constants, num_warps)


CONFIGURATIONS = (
    _configuration("each_row", bs=256, d_max=5, together=False),
    _configuration("each_row_deep", bs=512, d_max=16, together=False),
    _configuration("batch_16x4", bs=16, d_max=4, together=True),
    # as many elements as 8 warps are for
    _configuration("batch_128x8", bs=128, d_max=8, together=True),
    _configuration("batch_256x5", bs=256, d_max=5, together=True),
    _configuration("batch_512x16", bs=512, d_max=16, together=True),
)
