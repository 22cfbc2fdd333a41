"""A plugin of SGLang for servers that compute in float32 on a GPU: the norm kernels of sgl_kernel take 16 bits only, so
that such a server ends at its first norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FORWARD = "sglang.srt.layers.layernorm.RMSNorm.forward_cuda"


def register() -> None:
    """Entry point of group `sglang.srt.plugins`: norms of float32 go to SGLang's PyTorch code, others where they went.

    benchmarks/gpu/environment.py names it in the servers' environment.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FORWARD, _forward, HookType.AROUND)


def _forward(kernel: Callable[..., Any], norm: Any, x: Tensor, *others: Any, **named: Any) -> Any:
    if x.dtype == torch.float32:
        return norm.forward_native(x, *others, **named)
    return kernel(norm, x, *others, **named)
