"""Scratch memory of the kernels behind draft_stats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from c2t_kernels.checks import check_int, check_tensor
from c2t_kernels.stats.largest import PACKED
from c2t_kernels.stats.scan import CHUNKS, GROUPS


@dataclass(frozen=True)
class DraftStatsWorkspace:
    """Scratch memory of draft_stats for up to `rows` rows, one call at a time: 97 KiB per row. Made by `create`.

    Raises TypeError or ValueError, naming the buffer, for any that `create` would not have made.
    """

    partial: Tensor
    group_max: Tensor
    hits: Tensor
    packed: Tensor
    packed_ids: Tensor

    def __post_init__(self) -> None:
        check_tensor("DraftStatsWorkspace: partial", self.partial, dtype=torch.float32, shape=(None, 4, CHUNKS))
        rows, device = self.partial.shape[0], self.partial.device
        for name, columns, dtype in (
            ("group_max", GROUPS, torch.float32),
            ("hits", GROUPS, torch.int32),
            ("packed", PACKED, torch.float32),
            ("packed_ids", PACKED, torch.int32),
        ):
            buffer = getattr(self, name)
            check_tensor(f"DraftStatsWorkspace: {name}", buffer, dtype=dtype, shape=(rows, columns), device=device)
        for name, buffer in vars(self).items():
            if not buffer.is_contiguous():
                raise ValueError(f"DraftStatsWorkspace: {name} must be contiguous, got strides {buffer.stride()}")

    @classmethod
    def create(cls, rows: int, device: torch.device | str) -> DraftStatsWorkspace:
        """rows: largest batch. device: of the logits."""
        check_int("DraftStatsWorkspace: rows", rows, 0)
        return cls(
            partial=torch.empty(rows, 4, CHUNKS, dtype=torch.float32, device=device),
            group_max=torch.empty(rows, GROUPS, dtype=torch.float32, device=device),
            hits=torch.empty(rows, GROUPS, dtype=torch.int32, device=device),
            packed=torch.empty(rows, PACKED, dtype=torch.float32, device=device),
            packed_ids=torch.empty(rows, PACKED, dtype=torch.int32, device=device),
        )
