"""A plugin for tests only: SGLang's backends fa3 and FlashInfer run on twins of their kernels, so that a server of the
CPU engine can verify by them.

attention_twins.py and flashinfer_wrapper.py have to lie beside it. Kernels of SGLang's own that list pages are
interpreted: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import sys
import types
from typing import Any


def register() -> None:
    import attention_twins
    import sgl_kernel

    flash_attn = types.ModuleType("sgl_kernel.flash_attn")
    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata"):
        setattr(flash_attn, name, attention_twins.flash_attn_with_kvcache)
    sys.modules["sgl_kernel.flash_attn"] = flash_attn
    sgl_kernel.merge_state_v2 = attention_twins.merge_state_v2

    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("fa3")(_fa3)
    register_attention_backend("flashinfer")(_flashinfer)


def _fa3(runner: Any) -> Any:
    from attention_twins import flash_attn_with_kvcache
    from sglang.srt.layers.attention import flashattention_backend

    flashattention_backend.flash_attn_with_kvcache = flash_attn_with_kvcache
    flashattention_backend.get_device_capability = lambda *_: (9, 0)
    print("planted: a twin of fa3's kernel", flush=True)
    return flashattention_backend.FlashAttentionBackend(runner)


def _flashinfer(runner: Any) -> Any:
    from flashinfer_wrapper import PagedWrapper
    from sglang.srt.layers.attention import flashinfer_backend

    _without_wrappers(flashinfer_backend)
    flashinfer_backend.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper
    print("planted: a twin of FlashInfer's wrapper", flush=True)
    return flashinfer_backend.FlashInferAttnBackend(runner)


def _without_wrappers(module: Any) -> None:
    for kind in ("BatchPrefillWithPaged", "BatchPrefillWithRagged", "BatchDecodeWithPaged"):
        setattr(module, f"{kind}KVCacheWrapper", lambda *_, **__: None)
