"""What has to change inside stock SGLang 0.5.23 for the CPU engine, applied by the plugin in every server process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch._C import _autograd
from torch.autograd import profiler

from c2t_plugin.errors import ContractError

from . import sampling

# eagle_sample looks these up in its own module. Each can go when SGLang has a CPU implementation behind the name.
_SAMPLED_VERIFICATION = {
    # Stock answers True on every CPU, so at temperature > 0 all tokens but the first of a step would be the argmax.
    "_verify_uses_greedy": sampling.verify_uses_greedy,
    # None on a CPU: there is only a CUDA kernel.
    "tree_speculative_sampling_target_only": sampling.tree_speculative_sampling,
    # None on a CPU: they come from FlashInfer.
    "top_k_renorm_prob": sampling.top_k_renorm,
    "top_p_renorm_prob": sampling.top_p_renorm,
}
_PROFILES: list[object] = []


def apply() -> None:
    """Patch SGLang in this process; calling it again does nothing more.

    Raises ContractError if SGLang lacks one of the names, which means that this version needs another patch.
    """
    _allow_intel_amx_backend()
    from sgl_kernel.linear import wide
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.quantization import unquant
    from sglang.srt.speculative import eagle_utils

    _replace(eagle_utils, _SAMPLED_VERIFICATION)
    for method in (unquant.UnquantizedLinearMethod, unquant.UnquantizedEmbeddingMethod):
        method.process_weights_after_loading = _packing(method.process_weights_after_loading, wide)
    _replace(profiler, {"_disable_profiler": _disable_profiler})
    attention_registry.register_attention_backend("intel_amx")(lambda runner: ragged_attention(runner))


def _packing(original: Callable[[Any, Any], None], wide: Callable[[Any], bool]) -> Callable[[Any, Any], None]:
    """Over what SGLang does with a layer's weights once they are loaded: wide ones are multiplied with packed, as its
    own CPU kernels do it where there are some. Once, however often it is applied."""
    if getattr(original, "packing", False):
        return original

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        original(self, layer)
        if wide(layer.weight):
            layer.use_intel_amx_backend = True

    process_weights_after_loading.packing = True  # type: ignore[attr-defined]
    return process_weights_after_loading


def _disable_profiler() -> object:
    """torch's own, with its result kept for good.

    SGLang drops a profile once its file is written, and to free one with Python's call stacks ends the process with a
    segmentation fault now and then. Seen with torch 2.13 on Python 3.11; can go when it is not any more.
    """
    _PROFILES.append(_autograd._disable_profiler())
    return _PROFILES[-1]


def ragged_attention(runner: Any) -> Any:
    """The target's attention backend, imported when its model runner exists: it imports SGLang's memory pools."""
    from .ragged_attention import RaggedCpuAttnBackend, take_padded_batches

    take_padded_batches()
    return RaggedCpuAttnBackend(runner)


def _allow_intel_amx_backend() -> None:
    """Let `intel_amx` be the attention backend.

    It is the one CPU backend that the draft workers can build, and its kernels are the ones that the stub has, but
    on a CPU without AMX tiles SGLang replaces it with `torch_native`. Can go when `torch_native` drafts, or when the
    choice no longer asks for AMX.
    """
    from sglang.srt import runtime_context

    if not hasattr(runtime_context, "override_platform"):
        raise ContractError(
            "sglang.srt.runtime_context has no override_platform, which the CPU engine needs: install sglang==0.5.23"
        )
    if not runtime_context.get_platform().has_amx:
        runtime_context.override_platform(has_amx=True).install()


def _replace(module: ModuleType, replacements: Mapping[str, object]) -> None:
    missing = [name for name in replacements if not hasattr(module, name)]
    if missing:
        raise ContractError(
            f"{module.__name__} has no {', '.join(missing)}, which the CPU engine replaces: install sglang==0.5.23"
        )
    for name, replacement in replacements.items():
        setattr(module, name, replacement)
