"""CUDA graphs of the target for chains of unequal length, on model runner V2 with synchronous scheduling.

vLLM captures decode graphs for requests of K + 1 tokens each; graphs for any mix of 1 to K + 1 tokens it captures under
adaptive verification alone. Chains that are cut are such a mix: without these graphs almost every step would run
piecewise. It is vLLM's own manager, by the switch and after the questions that adaptive verification has. To fill
cut chains up to a captured length instead would have the target compute what was cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from c2t_plugin.engines.vllm.patches import KV_CACHE, MODEL_GRAPHS, PATCHES


def capture_any_lengths(runner: Any) -> None:
    """From here on this runner's graphs take chains of any length, where its attention can replay such."""
    PATCHES.on(KV_CACHE, runner, functools.partial(_making, runner))


def _making(runner: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM makes its graphs' manager here, and one more while it profiles memory."""

    @functools.wraps(stock)
    def initialize_kv_cache(*positional: Any, **keyword: Any) -> Any:
        manager = MODEL_GRAPHS.owner.ModelCudaGraphManager

        def made(*given: Any, **named: Any) -> Any:
            return manager(*given, **{**named, "varlen_decode": named["varlen_decode"] or takes_any_lengths(runner)})

        with PATCHES.during(MODEL_GRAPHS, made):
            return stock(*positional, **keyword)

    return initialize_kv_cache


def takes_any_lengths(runner: Any) -> bool:
    """Whether a graph of this runner's attention can be replayed for requests of 1 to K + 1 tokens."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

    support, _ = runner.model_state.get_additional_cg_support()
    if support != AttentionCGSupport.ALWAYS or runner.ubatch_runner is not None:
        # microbatches have graphs of equal lengths alone
        return False
    found = get_varlen_cudagraph_unsupported_backend(runner.attn_groups, runner.vllm_config, runner.decode_query_len)
    return found is None
