"""Which ragged attention verifies, and how many rows it gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from c2t_plugin.engines.sglang.layout import ROW_STEP, rows_to_compute
from c2t_plugin.engines.sglang.ragged import Choice, choose
from c2t_plugin.errors import ConfigError


class RaggedAttention:
    c2t_ragged = "triton"


class FlashAttentionBackend:
    def __init__(self, version: int) -> None:
        self.fa_impl_ver = version


class TorchNativeAttnBackend:
    pass


def runner(backend: Any, **changes: Any) -> SimpleNamespace:
    plain = {"use_mla_backend": False, "sliding_window_size": None, "mrope": False}
    chosen = {**plain, **changes}
    return SimpleNamespace(
        attn_backend=backend,
        model_config=SimpleNamespace(model_is_mrope=chosen.pop("mrope")),
        **chosen,
    )


@pytest.mark.parametrize(
    ("wanted", "backend", "expected"),
    [
        ("auto", RaggedAttention(), "triton"),
        ("triton", RaggedAttention(), "triton"),
        ("off", RaggedAttention(), None),
        ("auto", TorchNativeAttnBackend(), None),
        ("fa3", FlashAttentionBackend(3), "fa3"),
        ("auto", FlashAttentionBackend(3), None),  # never run: only for who asks
        ("auto", FlashAttentionBackend(4), None),
    ],
)
def test_choice(wanted: str, backend: Any, expected: str | None):
    choice = choose(wanted, SimpleNamespace(), runner(backend))
    assert choice.backend == expected
    assert choice.reason


@pytest.mark.parametrize(
    ("server_args", "changes", "reason"),
    [
        ({"enable_deterministic_inference": True}, {}, "deterministic"),
        ({"disable_cuda_graph_padding": True}, {}, "padded"),
        ({"enable_return_routed_experts": True}, {}, "routed experts"),
        ({"dcp_size": 2}, {}, "dcp_size"),
        ({}, {"mrope": True}, "three axes"),
        ({}, {"use_mla_backend": True}, "latent"),
        ({}, {"sliding_window_size": 512}, "sliding-window"),
    ],
)
def test_what_keeps_the_uniform_window(server_args: dict[str, Any], changes: dict[str, Any], reason: str):
    record, model = SimpleNamespace(**server_args), runner(RaggedAttention(), **changes)
    choice = choose("auto", record, model)
    assert choice.backend is None
    assert reason in choice.reason
    with pytest.raises(ConfigError, match=f"--speculative-c2t-ragged triton cannot be had: .*{reason}"):
        choose("triton", record, model)


def test_a_backend_that_the_server_does_not_run():
    with pytest.raises(ConfigError, match="ragged triton cannot be had: TorchNativeAttnBackend verifies"):
        choose("triton", SimpleNamespace(), runner(TorchNativeAttnBackend()))
    with pytest.raises(ConfigError, match="ragged fa3 cannot be had: the attention backend is RaggedAttention"):
        choose("fa3", SimpleNamespace(), runner(RaggedAttention()))
    assert choose("off", SimpleNamespace(), runner(TorchNativeAttnBackend())) == Choice(None, "as asked for")


@pytest.mark.parametrize(
    ("needed", "window", "captured", "expected"),
    [
        (1, 5, [], ROW_STEP),
        (4, 5, [], 4),
        (5, 5, [], 5),  # never more than the window
        (9, 40, [], 12),
        (40, 40, [], 40),
        (3, 15, [5, 10, 20], 5),
        (5, 15, [5, 10, 20], 5),
        (11, 15, [5, 10, 20], 20),  # padding requests of the graph included
        (22, 25, [5, 10, 20], 24),  # too large for every graph: eager
    ],
)
def test_rows(needed: int, window: int, captured: list[int], expected: int):
    assert rows_to_compute(needed, window, captured) == expected
