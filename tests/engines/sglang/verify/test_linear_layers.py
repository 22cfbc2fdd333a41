"""Which linear layers let rows be packed, and what is said of those that do not."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.sglang.verify.choice import choose, verifier
from tests.engines.sglang.verify.test_packing import (
    FlashAttentionBackend,
    HybridAttnBackend,
    RaggedAttention,
    TorchNativeAttnBackend,
    runner,
)


class DeepseekSparseAttnBackend:
    """By its name SGLang's own, as those that follow."""


class HybridLinearAttnBackend:
    """Attention in some layers, linear attention in the others."""

    def __init__(self, attention: Any, linear: Any) -> None:
        self.full_attn_backend, self.linear_attn_backend = attention, linear


class GDNAttnBackend:
    pass


class Mamba2AttnBackend:
    pass


class TritonKDAKernel:
    pass


class FlashInferKDAKernel:
    pass


class KDAAttnBackend:
    def __init__(self, kernel: Any) -> None:
        self.kernel_dispatcher = SimpleNamespace(verify_kernel=kernel)


KDA, FA3 = KDAAttnBackend(TritonKDAKernel()), FlashAttentionBackend(3)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (HybridLinearAttnBackend(FA3, KDA), "fa3"),
        (
            HybridLinearAttnBackend(HybridAttnBackend(TorchNativeAttnBackend(), RaggedAttention(), "decode"), KDA),
            "triton",
        ),
        (
            HybridAttnBackend(HybridLinearAttnBackend(FA3, KDA), HybridLinearAttnBackend(RaggedAttention(), KDA), ""),
            "fa3",
        ),
        (HybridLinearAttnBackend(TorchNativeAttnBackend(), KDA), None),
    ],
)
def test_kda_leaves_it_to_the_attention_beside_it(backend: Any, expected: str | None):
    assert choose(C2TConfig(), SimpleNamespace(), runner(backend)).backend == expected


def test_the_attention_is_what_verifies():
    assert verifier(HybridLinearAttnBackend(FA3, KDA)) is FA3


@pytest.mark.parametrize(
    ("backend", "mode", "reason"),
    [
        (
            FlashAttentionBackend(4),
            "chain",
            "FlashAttentionBackend by fa4 has not been tried on packed rows: use .* fa3",
        ),
        (DeepseekSparseAttnBackend(), "chain", r"dsa_backend\.py:1101 .*SGLang 32010, open"),
        (
            HybridLinearAttnBackend(FA3, GDNAttnBackend()),
            "chain",
            r"GDNAttnBackend verifies requests of one length only \(.*gdn_backend\.py:1042 .*SGLang 38897, open",
        ),
        (HybridLinearAttnBackend(FA3, Mamba2AttnBackend()), "chain", r"mamba/mamba\.py:670"),
        # within the one of two that verifies
        (
            HybridAttnBackend(
                HybridLinearAttnBackend(RaggedAttention(), Mamba2AttnBackend()), RaggedAttention(), "prefill"
            ),
            "chain",
            "Mamba2AttnBackend",
        ),
        (
            HybridLinearAttnBackend(RaggedAttention(), KDAAttnBackend(FlashInferKDAKernel())),
            "chain",
            "TritonKDAKernel only, not by FlashInferKDAKernel: leave --linear-attn-verify-backend out",
        ),
        (HybridLinearAttnBackend(RaggedAttention(), KDA), "tree", "KDAAttnBackend is packed for chains only"),
    ],
)
def test_what_takes_one_length_is_named_with_its_place(backend: Any, mode: str, reason: str):
    choice = choose(C2TConfig(mode=mode), SimpleNamespace(), runner(backend))
    assert choice.backend is None
    assert re.search(reason, choice.reason)
