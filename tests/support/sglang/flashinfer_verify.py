"""A plugin for tests only: on the CPU engine, the target verifies on the FlashInfer backend, with a stub wrapper.

Prefill, and all of the draft's, stay on the CPU engine's own attention. flashinfer_wrapper.py has to lie beside it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def register() -> None:
    from c2t_cpu_engine import patches

    # Whichever plugin SGLang loads first, this name is looked up last.
    patches.ragged_attention = _create
    print("planted: the target verifies on a stub for FlashInfer", flush=True)


def _create(runner: Any) -> Any:
    from c2t_cpu_engine.ragged_attention import RaggedCpuAttnBackend
    from flashinfer_wrapper import PagedWrapper
    from sglang.srt.layers.attention import flashinfer_backend
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    from c2t_plugin.engines.sglang.verify.flashinfer import PackedFlashInferAttnBackend

    def nothing(*_: Any, **__: Any) -> None:
        """Of the wrappers that verification does not use."""

    flashinfer_backend.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper
    flashinfer_backend.BatchPrefillWithRaggedKVCacheWrapper = nothing
    flashinfer_backend.BatchDecodeWithPagedKVCacheWrapper = nothing

    class FlashInferVerifies(RaggedCpuAttnBackend):
        c2t_packing = "flashinfer"
        # On a CPU SGLang's masks have the rows' own columns only, which is not what FlashInfer reads.
        verify_mask = SimpleNamespace(buffer=None, mode=TreeMaskMode.FULL_MASK, fits=lambda _: False)

        def __init__(self, runner: Any) -> None:
            super().__init__(runner)
            self.flashinfer = PackedFlashInferAttnBackend.of(flashinfer_backend.FlashInferAttnBackend(runner))

        def init_forward_metadata(self, forward_batch: Any) -> None:
            verifies = forward_batch.forward_mode.is_target_verify()
            (self.flashinfer if verifies else super()).init_forward_metadata(forward_batch)

        def forward_extend(self, q, k, v, layer, forward_batch, *positional: Any, **keyword: Any) -> Any:
            verifies = forward_batch.forward_mode.is_target_verify()
            backend = self.flashinfer if verifies else super()
            return backend.forward_extend(q, k, v, layer, forward_batch, *positional, **keyword)

    return FlashInferVerifies(runner)
