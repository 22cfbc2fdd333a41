"""Statistics that a server recorded against those that they were made from."""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_plugin.traces import coarse
from c2t_plugin.traces.forest import Forest


def levels(stats: Tensor) -> Tensor:
    """(..., 3) int64 of (..., 4): log P, entropy and margin as their numbers in a file. joint log P has none."""
    tables = {name: stats[..., place] for place, name in enumerate(("log_prob", "entropy", "margin"), start=1)}
    packed = coarse.packed(tables)
    return torch.stack([packed[name].long() for name in tables], dim=-1)


def stats_of(chain: Forest) -> Tensor:
    """(states, d_max, 4) of recorded chains."""
    return torch.stack([chain.joint_log_prob, chain.log_prob, chain.entropy, chain.margin], dim=-1)


def levels_apart(chain: Forest, stats: Tensor) -> int:
    """The largest distance of recorded chains to (states, d_max, 4) statistics. Where those round otherwise in their
    last bits it is 1."""
    return int((levels(stats_of(chain)) - levels(stats)).abs().max())
