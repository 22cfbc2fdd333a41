"""A draft loop ends between two steps when no request of the batch has a token left to draft: AllCut is thrown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class AllCut(Exception):
    """Thrown between two draft steps, outside vLLM's forward context; what was drafted so far stays where it is."""


class Ended:
    """Whether all chains of a draft have ended, as a GPU tells it: some passes late, and nobody waits for it.

    A pass more than is needed costs a pass; to wait after each would leave the GPU idle after each.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        """rows: of the largest batch."""
        self._lengths = torch.zeros(rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._told = torch.cuda.Event()
        # what `_lengths` is of: tokens of a chain, 0 where nothing was asked yet, and requests
        self._steps = self._rows = 0

    def after(self, steps: int, lengths: Callable[[], Tensor]) -> bool:
        """Asked once between two passes, from the first on. steps: tokens of each chain so far. lengths: (requests,)
        int32 of the device, what is kept of them."""
        asked = steps > 1 and self._steps > 0
        if asked and not self._told.query():
            return False
        if asked and not bool((self._lengths[: self._rows] == self._steps).any()):
            return True
        found = lengths()
        self._steps, self._rows = steps, len(found)
        self._lengths[: self._rows].copy_(found, non_blocking=True)
        self._told.record()
        return False


def may_leave(vllm_config: Any) -> bool:
    """Whether this engine's draft loop may end early.

    A rank that leaves the loop alone would leave the others waiting in a collective, and adaptive verification wants
    no question to the device between two draft steps.
    """
    parallel = vllm_config.parallel_config
    alone = parallel.world_size == 1 and parallel.data_parallel_size == 1
    return alone and not vllm_config.speculative_config.enable_adaptive_verification
