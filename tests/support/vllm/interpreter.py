"""Model runner V2 without a GPU: vLLM is made to believe in a CPU backend of Triton, and Triton interprets the kernels.

For tests alone, in a process of their own, before vLLM is imported: some hundred times slower than compiled kernels.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


def install() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends
    from triton.runtime import interpreter

    backends["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: True))
    stock = interpreter.InterpreterBuilder.create_masked_store

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        # the interpreter's C++ takes masks of bool alone, and vLLM's kernels make some of int
        mask.data = mask.data.astype(bool)
        return stock(self, ptrs, value, mask, *rest)

    interpreter.InterpreterBuilder.create_masked_store = create_masked_store


def replace_what_it_does_not_know() -> None:
    """In a process with install(): libdevice's functions are CUDA's alone, and vLLM's kernel for top-k and top-p makes
    some numbers that are tensors for a compiler only. vLLM has that one in torch too."""
    import triton.language as tl
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    topk_topp_sampler.HAS_TRITON = False
    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
