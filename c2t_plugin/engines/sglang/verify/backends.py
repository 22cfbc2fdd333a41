"""Our attention backends and capture layouts in the place of SGLang's, and which of a server's backends verifies.

What is imported here is imported when used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from c2t_plugin.config import AUTO, TREE_ATTENTION, C2TConfig
from c2t_plugin.engines.patching import become
from c2t_plugin.engines.sglang import args

# SGLang's own backends whose verification takes a length for each request, by class, and their names as options.
_STOCK = {
    "FlashAttentionBackend": "fa3",
    "TRTLLMHAAttnBackend": "trtllm_mha",
    "TRTLLMMLABackend": "trtllm_mla",
    "CuteDslMLABackend": "cutedsl_mla",
}


def parts(found: Any) -> tuple[Any, Any]:
    """The backend of attention that verifies, and that of the linear layers beside it; None: there are none."""
    linear = None
    while True:
        if hasattr(found, "spec_attn_is_decode"):  # FlashInfer's backend has prefill_backend too: a string
            found = found.decode_backend if found.spec_attn_is_decode else found.prefill_backend
        elif hasattr(found, "linear_attn_backend"):
            linear, found = found.linear_attn_backend, found.full_attn_backend
        else:
            return found, linear


def packing_attention(backend: Any) -> str | None:
    """By which of `packing` it packs rows; None: by none."""
    own: str | None = getattr(backend, "c2t_packing", None)
    if own is not None:
        return own
    found = _STOCK.get(type(backend).__name__)
    # of one class, which kernels they are: fa4 beside fa3, and on SM90 and SM120 one that takes a single length
    if getattr(backend, "fa_impl_ver", 3) != 3 or getattr(backend, "is_xqa_impl", False):
        return None
    return found if getattr(backend, "supports_ragged_verify_graph", False) else None


def packing_triton(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """SGLang's factory of Triton backends, which then makes ours where rows may be packed by it."""

    @functools.wraps(stock)
    def create(runner: Any) -> Any:
        config = args.config_of(runner.server_args)
        # An encoder-decoder is refused by SGLang's own, with its reason.
        if config.packing not in ("auto", "triton") or runner.model_config.is_encoder_decoder:
            return stock(runner)
        return packed_triton(config, runner)

    return create


def _packing(name: str, ours: Callable[[C2TConfig, Any, Any], Any]) -> Callable[[Any], Any]:
    """The same for its factory of backends of that name. ours: what stands in the place of what the factory made."""

    def patched(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(stock)
        def create(runner: Any) -> Any:
            backend, config = stock(runner), args.config_of(runner.server_args)
            return ours(config, runner, backend) if config.packing in ("auto", name) else backend

        return create

    return patched


def _flashinfer(_config: C2TConfig, _runner: Any, backend: Any) -> Any:
    # Which of the two, or neither, SGLang has imported with it. Their constructors ask for their own class alone.
    name = f"{type(backend).__module__}.{type(backend).__qualname__}"
    if name == "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend":
        from c2t_plugin.engines.sglang.verify.flashinfer import PackedFlashInferAttnBackend

        return PackedFlashInferAttnBackend.of(backend)
    if name == "sglang.srt.layers.attention.flashinfer_mla_backend.FlashInferMLAAttnBackend":
        from c2t_plugin.engines.sglang.verify.flashinfer_mla import PackedFlashInferMLABackend

        return become(backend, PackedFlashInferMLABackend)
    return backend


def _flashmla(config: C2TConfig, runner: Any, backend: Any) -> Any:
    if config.mode != "chain" or runner.is_draft_worker:
        return backend
    from c2t_plugin.engines.sglang.verify.flashmla import PackedFlashMLABackend

    return become(backend, PackedFlashMLABackend)


def _fa3(config: C2TConfig, runner: Any, backend: Any) -> Any:
    if config.mode != "tree" or runner.is_draft_worker:  # chains it packs as it is
        return backend
    from c2t_plugin.engines.sglang.verify.fa3 import PackedFa3Backend

    return PackedFa3Backend.of(backend, runner.model)


packing_flashinfer = _packing("flashinfer", _flashinfer)
packing_flashmla = _packing("flashmla", _flashmla)
packing_fa3 = _packing("fa3", _fa3)


def packed_triton(config: C2TConfig, runner: Any) -> Any:
    """The Triton backend for packed rows, with the kernel of the options."""
    from c2t_plugin.engines.sglang import ranks

    # under DP attention ranks verify whole windows too, by a mask (one_tier.py)
    nodes_alone = config.mode == "chain" and not ranks.apart()
    contested = config.attention == AUTO and str(runner.device).startswith("cuda") and not runner.is_draft_worker
    ours = config.attention == TREE_ATTENTION
    if contested:
        from c2t_plugin.engines.sglang.verify import fitness

        ours = fitness.wins(runner)
    if ours:
        from c2t_plugin.engines.sglang.verify.tree_attention import TreeTritonAttnBackend

        trees = config.mode == "tree"
        return TreeTritonAttnBackend(runner, masked=trees, asked_for=not contested, nodes_alone=nodes_alone)
    from c2t_plugin.engines.sglang.verify.triton import PackedTritonAttnBackend

    return PackedTritonAttnBackend(runner, nodes_alone=nodes_alone)


def with_capture_layout(stock: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's verify input for the capture of a target graph, with a layout where its rows are packed."""

    @functools.wraps(stock)
    def get_spec_info(self: Any, num_tokens: int) -> Any:
        spec_info = stock(self, num_tokens)
        # SGLang sets it for the algorithms that it packs rows of itself.
        if spec_info is not None and getattr(self, "ragged_verify_mode", False):
            spec_info.ragged_verify_layout = self._capture_ragged_verify_layout(num_tokens)
            if not self.model_runner.spec_algorithm.packing.masked:
                spec_info.custom_mask = None
        return spec_info

    return get_spec_info
