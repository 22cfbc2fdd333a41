"""Statistics of served chains in a byte each: as precise as a fit needs them, and no more.

64 levels, closer together near 0, where probabilities are near 1. On the toy pair's chains classifiers that were
fitted so verify as many tokens as others at the same accept length, and their AUC differs by less than that of another
seed does (benchmarks/simulation/precision.py). It saves room. It does not hide a text.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from c2t_kernels.network import PathSums, extend_path

LEVELS = 64
# The largest values that are told apart, in nats.
TOP = {"log_prob": 16.0, "entropy": 12.0, "margin": 24.0}


def packed(tables: Mapping[str, Tensor], levels: int = LEVELS) -> dict[str, Tensor]:
    """A chain's tables with its statistics as uint8, without joint_log_prob, which follows."""
    codes = {name: ((tables[name].abs() / top).clamp(max=1).sqrt() * (levels - 1)).round() for name, top in TOP.items()}
    kept = {name: value for name, value in tables.items() if name != "joint_log_prob"}
    return kept | {name: value.to(torch.uint8) for name, value in codes.items()}


def unpacked(tables: Mapping[str, Tensor], levels: int = LEVELS) -> dict[str, Tensor]:
    """Inverse of `packed`, as far as there is one: float32 statistics."""
    values = {name: (tables[name].float() / (levels - 1)) ** 2 * top for name, top in TOP.items()}
    log_prob, joint = -values["log_prob"], torch.empty_like(values["log_prob"])
    # that of the entropies is made where it is asked for
    none = torch.zeros(len(joint))
    path = PathSums(none, none)
    for depth in range(joint.shape[1]):
        path = extend_path(path, log_prob[:, depth], none)
        joint[:, depth] = path.joint_log_prob
    return {**tables, **values, "log_prob": log_prob, "joint_log_prob": joint}
