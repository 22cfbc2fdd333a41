"""Between C2T's chains and SGLang's tensors. Imports no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def cut_links(retrieve_next_token: Tensor, kept: Tensor) -> None:
    """Take out, in place, the link behind each request's last kept draft token.

    retrieve_next_token: (rows, width) int64, the engine's first-child links; node 0 is the root, -1 is no child.
    kept: (rows,) int32 in [0, width - 1].
    """
    retrieve_next_token.scatter_(1, kept.long().unsqueeze(1), -1)


def rows_to_compute(needed: int, captured: Sequence[int]) -> int:
    """How many rows a packed verify forward gets: the smallest tier that holds `needed`, which a planner counts on.

    captured: row counts that there is a graph for, ascending; where none is large enough, every count can be run.
    """
    return next((tier for tier in captured if tier >= needed), needed)


def packed_layout(forward_batch: Any) -> Any:
    """Where each request's rows are in a packed verify forward; None in every other forward."""
    if not forward_batch.forward_mode.is_target_verify() or forward_batch.spec_info is None:
        return None
    return forward_batch.spec_info.ragged_verify_layout


def padding_rows(rows: int, starts: Tensor) -> Tensor:
    """(rows,) bool, True for rows of no request. starts: (requests + 1,) int32, where each request's rows begin."""
    return torch.arange(rows, device=starts.device) >= starts[-1]


def within_the_others(lengths: Tensor, own: Tensor) -> Tensor:
    """(bs,) int32 lengths of drafts where those that are cut by a threshold of their own widen nobody else's window.

    own: (bs,) bool, which these are; not all.
    """
    return torch.where(own, lengths.minimum(lengths.masked_fill(own, 0).max()), lengths)
