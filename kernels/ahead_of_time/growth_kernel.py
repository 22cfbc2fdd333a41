"""Launches of c2t_kernels.growth.kernel that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration, signature_of
from c2t_kernels.growth.kernel import _blocks, grow_layer_kernel
from c2t_kernels.network import FEATURES


def _configuration(name: str, slots: int, k: int, features: tuple[str, ...], hidden: int) -> Configuration:
    blocks, num_warps = _blocks(slots, k, k, features, hidden)
    kinds = {
        **{"p_alive": "*u8", "p_token_ids": "*i64", "p_kept": "*u8", "p_children": "*i32", "p_parents": "*i32"},
        **{"p_next_token_ids": "*i64", "p_next_alive": "*u8"},
    }
    signature = signature_of(grow_layer_kernel, blocks, kinds)
    return Configuration(grow_layer_kernel, name, signature, blocks, num_warps)


PAPER = ("joint_prob", "entropy", "depth")
CONFIGURATIONS = (
    _configuration("root_10", 1, 10, PAPER, 48),
    _configuration("layer_4x4", 4, 4, PAPER, 48),
    _configuration("layer_10x10", 10, 10, PAPER, 48),
    _configuration("layer_15x15", 15, 15, PAPER, 48),
    _configuration("layer_10x10_all_features", 10, 10, FEATURES, 64),
    _configuration("layer_32x32_all_features", 32, 32, FEATURES, 64),
)
