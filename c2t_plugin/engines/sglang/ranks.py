"""Tensor-parallel ranks: they have to take the same steps, though each may round the same logits its own way."""

from __future__ import annotations

import torch
from sglang.srt.distributed import get_tp_group
from torch import Tensor


def alone() -> bool:
    """Whether there is one rank only."""
    return bool(get_tp_group().world_size == 1)


def leads() -> bool:
    """Whether this is the rank that reports and records."""
    return bool(get_tp_group().rank_in_group == 0)


def agree(tensor: Tensor) -> Tensor:
    """The first rank's values: a different cut or tree would desynchronise the others."""
    return tensor if alone() else get_tp_group().broadcast(tensor, src=0)


def agree_on(number: int, device: torch.device | str) -> int:
    """The first rank's number. Waits for the device where there are several ranks."""
    return number if alone() else int(agree(torch.tensor([number], dtype=torch.int32, device=device)))


def all_hold(here: bool) -> bool:
    """Whether it holds on every rank."""
    if alone():
        return here
    held = torch.tensor([int(here)])
    torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return bool(held)
