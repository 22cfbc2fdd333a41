"""Limits of single requests where a scorer's rows are places in a batch, which the next batch gives to others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from c2t_plugin.limits import RequestLimits


class RowLimits(RequestLimits):
    """RequestLimits whose slots are places in the batch at hand."""

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        """As the next base takes them."""
        super().__init__(*positional, **keyword)
        self._rows = torch.arange(len(self._slot_beta), device=self._slot_beta.device)

    def limit(self, betas: Sequence[float | None], depths: Sequence[int | None]) -> None:
        """To be called before each draft: what its requests have set for themselves, None where nothing."""
        self._any_own = any(value is not None for value in (*betas, *depths))
        if self._any_own:
            self.set_requests(self._rows[: len(betas)], betas, depths)
