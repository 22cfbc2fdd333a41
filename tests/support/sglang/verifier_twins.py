"""A plugin for tests only: SGLang's backends fa3 and FlashInfer run on twins of their kernels, so that a server of the
CPU engine can verify by them.

attention_twins.py and flashinfer_wrapper.py have to lie beside it. Kernels of SGLang's own that list pages are
interpreted: TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    from attention_twins import stand_in

    stand_in()
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
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    flashinfer_backend.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper
    for name in ("BatchPrefillWithRaggedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        # which verification does not use
        setattr(flashinfer_backend, name, lambda *_, **__: None)
    # on a CPU SGLang's masks have the rows' own columns only, which is not what FlashInfer reads
    mask = VerifyMask(buffer=torch.zeros(0, dtype=torch.bool), mode=TreeMaskMode.FULL_MASK, max_bs=0)
    flashinfer_backend.FlashInferAttnBackend.verify_mask = mask
    print("planted: a twin of flashinfer's kernel", flush=True)
    return flashinfer_backend.FlashInferAttnBackend(runner)
