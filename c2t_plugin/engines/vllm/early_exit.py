"""A draft loop ends between two steps when no request of the batch has a token left to draft: AllCut is thrown."""

from __future__ import annotations

from typing import Any


class AllCut(Exception):
    """Thrown between two draft steps, outside vLLM's forward context; what was drafted so far stays where it is."""


def may_leave(vllm_config: Any) -> bool:
    """Whether this engine's draft loop may end early.

    A rank that leaves the loop alone would leave the others waiting in a collective, and adaptive verification wants
    no question to the device between two draft steps.
    """
    parallel = vllm_config.parallel_config
    alone = parallel.world_size == 1 and parallel.data_parallel_size == 1
    return alone and not vllm_config.speculative_config.enable_adaptive_verification
