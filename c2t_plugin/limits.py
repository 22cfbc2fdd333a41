"""How much of a draft is verified at most: the server's threshold and depth, and those of single requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from c2t_plugin.errors import ConfigError
from c2t_plugin.request_options import is_number, shown


class RequestLimits:
    """A threshold and a largest depth for every request of a batch, in device buffers made once.

    Nothing here synchronises with the host but the three setters, so that `limits_of` can stand in a CUDA graph.
    """

    def __init__(self, *, slots: int, max_depth: int, beta: float, device: torch.device | str) -> None:
        """slots: request slots that may have limits of their own. max_depth: draft steps."""
        self.d_max = max_depth
        # Whether a request's own threshold holds only where it is above the server's. To be set before the first draft.
        self.lower = False
        self.beta = torch.empty(1, dtype=torch.float32, device=device)
        self.max_depth = torch.empty(1, dtype=torch.int32, device=device)
        # A request's own beta and longest draft; NaN and -1 where it has none.
        self._slot_beta = torch.full((slots,), torch.nan, dtype=torch.float32, device=device)
        self._slot_depth = torch.full((slots,), -1, dtype=torch.int32, device=device)
        # whether any slot has some, and whether a request of the batch at hand may have
        self._any_slot = self.own_here = False
        self.set_beta(beta)
        self.set_max_depth(max_depth)

    def set_beta(self, beta: float) -> None:
        """Change the threshold from the next draft on. Raises ConfigError unless it is in [0, 1]."""
        if not (is_number(beta) and 0.0 <= beta <= 1.0):
            raise ConfigError(f"beta must be a number in [0, 1], got {shown(beta)}")
        self.beta.fill_(beta)
        self._least = beta

    def set_max_depth(self, max_depth: int) -> None:
        """Verify no draft token deeper than this; 0 verifies none. Raises ConfigError above d_max."""
        if not (is_number(max_depth) and 0 <= max_depth <= self.d_max and max_depth == int(max_depth)):
            raise ConfigError(
                f"max_depth must be a whole number from 0 to the draft steps ({self.d_max}), got {shown(max_depth)}"
            )
        self.max_depth.fill_(max_depth)
        self._most = max_depth

    def set_requests(self, slots: Tensor, betas: Sequence[float | None], max_depths: Sequence[int | None]) -> None:
        """Give the requests in these slots ((n,) int64) their own beta and depth; None means the server's.

        To be called whenever a slot gets a new request. A depth above d_max is d_max.
        """
        if not self._any_slot and all(value is None for value in (*betas, *max_depths)):
            return
        self._any_slot = self.own_here = True
        own_beta = [math.nan if beta is None else beta for beta in betas]
        own_depth = [-1 if depth is None else depth for depth in max_depths]
        self._slot_beta[slots] = torch.tensor(own_beta, dtype=torch.float32).to(self.beta.device, non_blocking=True)
        self._slot_depth[slots] = torch.tensor(own_depth, dtype=torch.int32).to(self.beta.device, non_blocking=True)

    @property
    def cuts(self) -> bool:
        """Whether a limit may cut a draft."""
        return self.own_here or self._least > 0.0 or self._most < self.d_max

    @property
    def any_own(self) -> bool:
        """Whether a request may be cut by its own threshold alone."""
        return self.own_here and not self.lower

    def owns(self, slots: Tensor) -> Tensor:
        """(n,) bool: which of the requests in these slots ((n,) int64) are cut by their own threshold alone."""
        return ~self._slot_beta[slots].isnan() if self.any_own else torch.zeros_like(slots, dtype=torch.bool)

    def limits_of(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Threshold (n,) float32 and largest depth (n,) int32 of the requests in these slots ((n,) int64)."""
        beta, depth = self._slot_beta[slots], self._slot_depth[slots]
        beta = torch.where(beta.isnan(), self.beta, beta.maximum(self.beta) if self.lower else beta)
        # The server's own largest depth holds for every request: it is how an operator takes load off.
        return beta, torch.where(depth < 0, self.max_depth, torch.minimum(depth, self.max_depth))
