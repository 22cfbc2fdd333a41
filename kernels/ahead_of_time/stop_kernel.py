"""Launches of c2t_kernels.stop.kernel that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration, signature_of
from c2t_kernels.stop.kernel import blocks, early_stop_kernel


def _configuration(name: str, *, bs: int, d_max: int, together: bool, tells: bool = True) -> Configuration:
    """together: whether there is a budget; by value where it also `tells` what is wanted and not known and cuts links,
    as in a step, else read at run time."""
    block_b, block_d, num_warps = blocks(bs, d_max, together)
    read, told = together and not tells, together and tells
    given = {"p_budget": read, "p_unclipped": told, "p_unknown": tells, "p_links": tells}
    constants = {
        **{name: None for name, is_given in given.items() if not is_given},
        **{"LIMITED": together, "BLOCK_B": block_b, "BLOCK_D": block_d},
    }
    kinds = dict.fromkeys(("p_max_depth", "p_budget", "p_lengths", "p_unclipped"), "*i32")
    kinds |= dict.fromkeys(("p_unknown", "p_links"), "*i64")
    signature = signature_of(early_stop_kernel, constants, kinds)
    return Configuration(early_stop_kernel, name, signature, constants, num_warps)


CONFIGURATIONS = (
    _configuration("each_row", bs=256, d_max=5, together=False),
    _configuration("each_row_deep", bs=512, d_max=16, together=False),
    _configuration("batch_16x4", bs=16, d_max=4, together=True),
    _configuration("batch_16x4_read", bs=16, d_max=4, together=True, tells=False),
    # as many elements as 8 warps are for
    _configuration("batch_128x8", bs=128, d_max=8, together=True),
    _configuration("batch_256x5", bs=256, d_max=5, together=True),
    _configuration("batch_512x16", bs=512, d_max=16, together=True),
)
