"""Which kernel packing triton verifies by, and what `tree_attention` is refused for."""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from tests.support.engines.undone import sglang_undone  # noqa: E402


@pytest.fixture
def own(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang.verify import tree_attention

    return tree_attention


@pytest.fixture
def fitness(own: ModuleType) -> ModuleType:
    from c2t_plugin.engines.sglang.verify import fitness

    return fitness


def layers(fitness: Any, **changes: Any) -> torch.nn.Module:
    plain = {"num_heads": 4, "head_dim": 128, "scaling": 1.0, "num_kv_heads": 2, "layer_id": 3}
    layer = fitness.RadixAttention(**{name: changes.pop(name, value) for name, value in plain.items()})
    vars(layer).update(changes)
    return torch.nn.ModuleList([layer])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 96}, "layer 3 of the target has heads of 96 for keys and 96 for values, not of one of 64, 128"),
        ({"v_head_dim": 64}, "heads of 128 for keys and 64 for values"),
        ({"logit_cap": 50.0}, "a logit cap"),
        ({"sliding_window_size": 512}, "a sliding window"),
        ({"is_cross_attention": True}, "not causal"),
        ({"attn_type": "encoder_only"}, "not causal"),
        ({"xai_temperature_len": 9}, "a temperature"),
        ({"k_scale_float": 0.5, "v_scale_float": 1.0}, "scaled keys"),
        ({"v_scale_float": 2.0}, "scaled keys"),
    ],
)
def test_what_tree_attention_does_not_compute(fitness: Any, changes: dict[str, Any], reason: str):
    model = SimpleNamespace(model=layers(fitness, **changes), dtype="bf16", kv_cache_dtype="bf16")
    with pytest.raises(ConfigError, match=f"--speculative-c2t-attention tree cannot be had: .*{reason}.*; leave it"):
        fitness.refuse_unfit(model)


def test_tree_attention_takes_plain_layers_and_a_cache_of_one_dtype(fitness: Any):
    fitness.refuse_unfit(SimpleNamespace(model=layers(fitness), dtype="bf16", kv_cache_dtype="bf16"))
    # as SGLang leaves the layers of every checkpoint of 8 bits
    of_fp8 = {"k_scale": torch.tensor(1.0), "k_scale_float": 1.0, "v_scale": torch.tensor(1.0), "v_scale_float": 1.0}
    fitness.refuse_unfit(SimpleNamespace(model=layers(fitness, **of_fp8), dtype="bf16", kv_cache_dtype="bf16"))
    with pytest.raises(ConfigError, match="the target computes in bf16 and keeps keys and values in fp8"):
        fitness.refuse_unfit(SimpleNamespace(model=layers(fitness), dtype="bf16", kv_cache_dtype="fp8"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("sinks", torch.ones(4)), ("logit_cap", 50.0), ("causal", False), ("k_scale", 0.5), ("new_option", None)],
)
def test_a_call_that_asks_for_more_is_refused(own: Any, name: str, value: Any):
    backend = own.TreeTritonAttnBackend.__new__(own.TreeTritonAttnBackend)
    backend._packed = True
    options = {"causal": True, "k_scale": 1.0, name: value}
    arguments = [None] * 10 + [options.pop("causal"), None, 1, options.pop("k_scale"), 1.0, 1.0]
    with pytest.raises(ConfigError, match=f"tree cannot be had: a layer of the target attends with {name}; leave it"):
        backend._attend(*arguments, **options)


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("attention", ["stock", "tree"])
def test_the_backend_that_sglang_builds(own: Any, monkeypatch: pytest.MonkeyPatch, mode: str, attention: str):
    """By the worker of either mode."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    from c2t_plugin.engines.sglang import algo

    monkeypatch.setitem(attention_registry.ATTENTION_BACKENDS, "triton", lambda _: "stock")
    monkeypatch.setattr(TritonAttnBackend, "__init__", lambda self, runner: vars(self).update(vars(runner)))
    record = SimpleNamespace(_c2t={"mode": mode, "attention": attention})
    algo._worker_class("EAGLE3", record)
    model_config = SimpleNamespace(is_encoder_decoder=False)
    parts = {"num_draft_tokens": 9, "device": "cpu", "extend_attention_fwd": None, "_verify_mask": None}
    runner = SimpleNamespace(model_config=model_config, server_args=record, **parts)
    made = attention_registry.ATTENTION_BACKENDS["triton"](runner)
    sglang_undone()
    assert attention_registry.ATTENTION_BACKENDS["triton"](runner) == "stock"
    assert type(made) is (own.TreeTritonAttnBackend if attention == "tree" else own.PackedTritonAttnBackend)
    own_columns = made.verify_mask is not None and made.verify_mask.mode == TreeMaskMode.QLEN_ONLY
    # SGLang's kernel reads the prefix's columns of a tree; of packed chains nobody reads any
    assert own_columns == made.c2t_nodes_alone == (mode == "chain" or attention == "tree")


@pytest.mark.parametrize("attention", ["stock", "tree"])
def test_ranks_with_requests_of_their_own_have_masks_of_chains_filled(
    own: Any, monkeypatch: pytest.MonkeyPatch, attention: str
):
    """They verify whole windows where one of them has no graph for its rows."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from c2t_plugin.config import C2TConfig
    from c2t_plugin.engines.sglang import ranks
    from c2t_plugin.engines.sglang.verify.backends import packed_triton

    monkeypatch.setattr(ranks, "apart", lambda: True)
    monkeypatch.setattr(TritonAttnBackend, "__init__", lambda self, runner: vars(self).update(vars(runner)))
    runner = SimpleNamespace(device="cpu", num_draft_tokens=9, extend_attention_fwd=None, _verify_mask=None)
    made = packed_triton(C2TConfig(attention=attention), runner)
    assert made.verify_mask is None
    assert not made.c2t_nodes_alone


@pytest.mark.parametrize("first", [True, False])
def test_one_contest_decides_for_all_depths_and_the_first_ranks_for_all_ranks(
    fitness: Any, first: bool, monkeypatch: pytest.MonkeyPatch
):
    """Each depth has a backend of its own, made later; on an H200 some had lost and some had won."""
    from c2t_plugin.engines.sglang import ranks
    from c2t_plugin.engines.sglang.verify import contest

    widths: list[int] = []

    def won(ours: Any, stock: Any, heads: Any, width: int, *rest: Any) -> bool:
        widths.append(width)
        return len(widths) > 1

    monkeypatch.setattr(contest, "won", won)
    monkeypatch.setattr(fitness, "_VERDICTS", {})
    monkeypatch.setattr(ranks, "agree_on", lambda mine: int(first))
    model = layers(fitness, tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=128)
    for width in (7, 3, 2):
        runner = SimpleNamespace(
            model=model,
            dtype="bf16",
            kv_cache_dtype="bf16",
            device="cuda",
            # as 0.5.23 leaves what nobody gave; what it comes to is told elsewhere
            server_args=SimpleNamespace(speculative_num_draft_tokens=None),
        )
        monkeypatch.setattr(fitness, "get_spec", functools.partial(SimpleNamespace, speculative_num_draft_tokens=width))
        assert fitness.wins(runner) is first
    assert widths == [7]
