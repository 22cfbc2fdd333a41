"""Repairs of vLLM 0.32 on a CPU, where speculative decoding at a temperature above 0 samples from noise or ends.

Stock code copies the tensor that it is to fill whenever that holds anything but int64, fills the copy and drops it, so
temperature, top-k and top-p of a batch with drafts are uninitialised memory (vLLM issue 55005). And top-k of a batch
without a draft, as every first one is, takes the maximum of nothing, which ends the engine. Needed wherever vLLM
replaces its Triton kernels, which is on a CPU without a Triton backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from c2t_plugin.engines.vllm.patches import CPU, PATCHES

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(
    output_ptr: Tensor,
    input_ptr: Tensor,
    cu_num_tokens_ptr: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Give each request's value to each of its tokens, in place.

    output_ptr: (tokens,). input_ptr: (requests,). cu_num_tokens_ptr: (requests,) running sums of tokens per request.
    A value equal to replace_from becomes replace_to. The names are the kernel's own, which vLLM launches by name.
    """
    counts = cu_num_tokens_ptr.diff(prepend=cu_num_tokens_ptr.new_zeros(1)).long()
    values = torch.where(input_ptr == replace_from, torch.full_like(input_ptr, replace_to), input_ptr)
    spread = values.repeat_interleave(counts)
    output_ptr[: spread.shape[0]] = spread.to(output_ptr.dtype)


def unless_empty(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Top-k and top-p that leave (0, vocab) logits as they are."""

    @functools.wraps(stock)
    def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
        return stock(logits, k, p) if logits.shape[0] else logits

    return apply_top_k_top_p


def install() -> None:
    """Put both in place of vLLM's, in this process. Idempotent."""
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import register_kernels

    if HAS_TRITON:
        return
    # each engine of the process has put vLLM's own in place again
    kernels: dict[str, Any] = {KERNEL: expand}
    register_kernels(kernels)
    PATCHES.apply(CPU)
