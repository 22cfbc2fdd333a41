"""Tensor-parallel ranks: they have to take the same steps, though each may round the same logits its own way."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.distributed.parallel_state import get_attn_tp_group
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from torch import Tensor

# Whether ranks have requests of their own: DP attention.
apart = is_dp_attention_enabled


def _peers() -> Any:
    """Those that have the same requests; what the others agree on: dp_attention.py."""
    return get_attn_tp_group() if apart() else get_tp_group()


def alone() -> bool:
    """Whether there is one rank only."""
    return bool(get_tp_group().world_size == 1) and not apart()


def leads() -> bool:
    """Whether this is the rank that reports and records its requests."""
    return bool(_peers().rank_in_group == 0)


def agree(tensor: Tensor) -> Tensor:
    """The first rank's values: a different cut or tree would desynchronise the others."""
    peers = _peers()
    return tensor if peers.world_size == 1 else peers.broadcast(tensor, src=0)


def agree_on(number: int) -> int:
    """The first rank's number, from host to host: a tensor of the device would have to wait for what that does."""
    peers = _peers()
    if peers.world_size == 1:
        return number
    told = torch.tensor([number])
    torch.distributed.broadcast(told, src=peers.ranks[0], group=peers.cpu_group)
    return int(told)


def all_hold(here: bool) -> bool:
    """Whether it holds on every rank."""
    if alone():
        return here
    held = torch.tensor([int(here)])
    torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return bool(held)


def agreed_rows(planner: Any, requests: int) -> int | None:
    """See StepPlanner.plan_rows."""
    rows = planner.plan_rows(requests)
    return None if rows is None else agree_on(rows)
