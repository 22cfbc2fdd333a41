"""Limits of single requests where a scorer's rows are places in a batch, which the next batch gives to others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from c2t_plugin.limits import RequestLimits
from c2t_plugin.request_options import RequestOptions


class RowLimits(RequestLimits):
    """RequestLimits whose slots are places in the batch at hand."""

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        """As the next base takes them."""
        super().__init__(*positional, **keyword)
        self._rows = torch.arange(len(self._slot_beta), device=self._slot_beta.device)

    def limit(self, own: Sequence[RequestOptions]) -> None:
        """To be called before each draft: what each of its requests has set for itself."""
        betas, depths = [each.threshold for each in own], [each.longest for each in own]
        self.own_here = any(value is not None for value in (*betas, *depths))
        if self.own_here:
            self.set_requests(self._rows[: len(own)], betas, depths)
