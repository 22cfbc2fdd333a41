"""Which ragged attention verifies, and how many rows it gets."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cpu_engine import SITE
from c2t_kernels import pack_ragged
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.sglang.verify import choice as choice_module
from c2t_plugin.engines.sglang.verify.backends import with_capture_layout
from c2t_plugin.engines.sglang.verify.choice import Choice, choose, start
from c2t_plugin.engines.sglang.verify.layout import rows_to_compute
from c2t_plugin.engines.sglang.verify.packing import PackedVerify, layout_of
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner.budget import padded


class RaggedAttention:
    c2t_packing = "triton"


class FlashAttentionBackend:
    """By its name SGLang's own, as those that follow."""

    supports_ragged_verify_graph = True

    def __init__(self, version: int) -> None:
        self.fa_impl_ver = version


class TRTLLMHAAttnBackend:
    supports_ragged_verify_graph = True

    def __init__(self, xqa: bool = False) -> None:
        self.is_xqa_impl = xqa


class TRTLLMMLABackend:
    supports_ragged_verify_graph = True


class CuteDslMLABackend(TRTLLMMLABackend):
    """It is SGLang's own name that counts."""


class HybridAttnBackend:
    """Prefill by one, decoding by another."""

    def __init__(self, prefill: Any, decode: Any, verifies: str) -> None:
        self.prefill_backend, self.decode_backend, self.spec_attn_is_decode = prefill, decode, verifies == "decode"


class FlashInferAttnBackend:
    """By its name alone SGLang's own, which `install` replaces where it is asked to. Which kernels it takes, as 0.5.23
    has it: under a name of the hybrid backend's."""

    prefill_backend = decode_backend = "fa2"


class RaggedFlashInfer(FlashInferAttnBackend):
    c2t_packing = "flashinfer"


class PackedFa3:
    c2t_packing = "fa3"


class TorchNativeAttnBackend:
    pass


def runner(backend: Any, **changes: Any) -> SimpleNamespace:
    plain = {"use_mla_backend": False, "sliding_window_size": None, "attention_chunk_size": None}
    model_config = SimpleNamespace(model_is_mrope=changes.pop("mrope", False))
    return SimpleNamespace(attn_backend=backend, model_config=model_config, **{**plain, **changes})


@pytest.mark.parametrize(
    ("wanted", "backend", "expected"),
    [
        ("auto", RaggedAttention(), "triton"),
        ("triton", RaggedAttention(), "triton"),
        ("off", RaggedAttention(), None),
        ("auto", TorchNativeAttnBackend(), None),
        ("fa3", FlashAttentionBackend(3), "fa3"),
        ("auto", FlashAttentionBackend(3), "fa3"),
        ("auto", FlashAttentionBackend(4), None),
        ("flashinfer", RaggedFlashInfer(), "flashinfer"),
        ("auto", RaggedFlashInfer(), "flashinfer"),
        ("auto", FlashInferAttnBackend(), None),
        ("auto", TRTLLMHAAttnBackend(), "trtllm_mha"),
        ("trtllm_mha", TRTLLMHAAttnBackend(), "trtllm_mha"),
        ("auto", TRTLLMHAAttnBackend(xqa=True), None),  # a kernel of one length
        ("auto", TRTLLMMLABackend(), "trtllm_mla"),
        ("auto", CuteDslMLABackend(), "cutedsl_mla"),
        ("auto", HybridAttnBackend(FlashAttentionBackend(3), TorchNativeAttnBackend(), "prefill"), "fa3"),
        ("auto", HybridAttnBackend(FlashAttentionBackend(3), TorchNativeAttnBackend(), "decode"), None),
        ("auto", HybridAttnBackend(TorchNativeAttnBackend(), RaggedAttention(), "decode"), "triton"),
    ],
)
def test_choice(wanted: str, backend: Any, expected: str | None):
    choice = choose(C2TConfig(packing=wanted), SimpleNamespace(), runner(backend))
    assert choice.backend == expected
    assert choice.reason


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("name", "file"),
    [("spec_attn_is_decode", "hybrid_attn_backend.py"), ("linear_attn_backend", "hybrid_linear_attn_backend.py")],
)
def test_the_names_by_which_we_know_wrappers_are_of_wrappers_alone(name: str, file: str):
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed in this environment")
    files = Path(spec.origin).parent.joinpath("srt", "layers", "attention").rglob("*.py")
    assert [each.name for each in files if f"self.{name} =" in each.read_text(encoding="utf-8")] == [file]


@pytest.mark.parametrize(
    ("server_args", "changes", "reason"),
    [
        ({"enable_deterministic_inference": True}, {}, "deterministic"),
        ({"disable_cuda_graph_padding": True}, {}, "padded"),
        ({"enable_return_aux_hidden_states": True}, {}, "hidden states"),
        ({"dcp_size": 2}, {}, "dcp_size"),
        ({}, {"attention_chunk_size": 8192}, "chunked attention: .*:1083"),
    ],
)
def test_what_keeps_the_uniform_window(server_args: dict[str, Any], changes: dict[str, Any], reason: str):
    record, model = SimpleNamespace(**server_args), runner(RaggedAttention(), **changes)
    choice = choose(C2TConfig(), record, model)
    assert choice.backend is None
    assert re.search(reason, choice.reason)
    with pytest.raises(ConfigError, match=f"--speculative-c2t-packing triton cannot be had: .*{reason}"):
        choose(C2TConfig(packing="triton"), record, model)


def test_ranks_with_requests_of_their_own_pack_rows_where_attention_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang.verify import one_tier

    monkeypatch.setattr(choice_module.ranks, "apart", lambda: True)
    monkeypatch.setattr(one_tier, "obstacle", lambda packing, *_: "DP attention" if packing == "auto" else None)
    asked, named = C2TConfig(), C2TConfig(packing="triton")
    choice = choose(asked, SimpleNamespace(), runner(RaggedAttention()))
    assert choice == Choice(None, "DP attention")
    assert choose(named, SimpleNamespace(), runner(RaggedAttention())).backend == "triton"
    monkeypatch.setattr(one_tier, "obstacle", lambda *_: "DP attention: ranks take graphs of their own sizes")
    with pytest.raises(ConfigError, match="--speculative-c2t-packing triton cannot be had: DP attention: ranks take"):
        choose(named, SimpleNamespace(), runner(RaggedAttention()))


@pytest.mark.parametrize("packs", [True, False])
def test_positions_of_three_axes_are_packed_where_sglang_takes_them(monkeypatch: pytest.MonkeyPatch, packs: bool):
    monkeypatch.setattr(choice_module, "takes_axes", lambda: packs)
    choice = choose(C2TConfig(), SimpleNamespace(), runner(RaggedAttention(), mrope=True))
    assert (choice.backend is not None, "three axes" in choice.reason) == (packs, not packs)


@pytest.mark.parametrize("field", ["enable_return_routed_experts", "enable_return_indexer_topk"])
@pytest.mark.parametrize(("mode", "packs"), [("chain", True), ("tree", False)])
def test_what_is_kept_by_slot_is_packed_for_chains(field: str, mode: str, packs: bool):
    choice = choose(C2TConfig(mode=mode), SimpleNamespace(**{field: True}), runner(RaggedAttention()))
    assert (choice.backend is not None, f"{field}: " in choice.reason) == (packs, not packs)


@pytest.mark.parametrize(
    ("backend", "modes"),
    [
        (FlashAttentionBackend(3), ("chain",)),
        (PackedFa3(), ("chain", "tree")),
        (RaggedAttention(), ("chain", "tree")),
        (TRTLLMMLABackend(), ("chain",)),
        (TRTLLMHAAttnBackend(), ()),
    ],
)
def test_latent_keys_are_packed_where_the_kernel_takes_lengths(backend: Any, modes: tuple[str, ...]):
    for mode in ("chain", "tree"):
        found = choose(C2TConfig(mode=mode), SimpleNamespace(), runner(backend, use_mla_backend=True))
        assert (found.backend is not None) == (mode in modes)
    if not modes:
        assert "latent keys are packed on fa3, triton only, for trees" in found.reason


@pytest.mark.parametrize(
    ("backend", "mode", "packs"),
    [
        (FlashAttentionBackend(3), "chain", True),
        (TRTLLMHAAttnBackend(), "chain", True),
        (RaggedAttention(), "chain", True),
        (RaggedAttention(), "tree", False),
        (RaggedFlashInfer(), "chain", False),
    ],
)
def test_sliding_windows(backend: Any, mode: str, packs: bool):
    found = choose(C2TConfig(mode=mode), SimpleNamespace(), runner(backend, sliding_window_size=512))
    assert (found.backend is not None, "sliding windows" in found.reason) == (packs, not packs)


def test_metadata_in_a_graph_of_its_own_keeps_the_uniform_window(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    choice = choose(C2TConfig(), SimpleNamespace(), runner(RaggedAttention()))
    assert (choice.backend, "METADATA_GLUE_GRAPH" in choice.reason) == (None, True)


def test_trees_are_packed_where_a_request_has_a_mask_of_its_own():
    trees, record = C2TConfig(mode="tree"), SimpleNamespace()
    assert choose(trees, record, runner(RaggedAttention())) == Choice(
        "triton", "attention backend RaggedAttention", masked=True
    )
    assert not choose(C2TConfig(), record, runner(RaggedAttention())).masked
    choice = choose(trees, record, runner(PackedFa3()))
    assert (choice.backend, choice.masked) == ("fa3", True)
    choice = choose(trees, record, runner(FlashAttentionBackend(3)))
    assert (choice.backend, "fa3 packs chains only" in choice.reason) == (None, True)
    assert choose(trees, record, runner(PackedFa3(), use_mla_backend=True)).backend == "fa3"
    choice = choose(trees, record, runner(RaggedFlashInfer(), use_mla_backend=True))
    assert "latent keys are packed on fa3, triton only, for trees" in choice.reason
    with pytest.raises(ConfigError, match="packing fa3 cannot be had: fa3 packs chains only"):
        choose(C2TConfig(mode="tree", packing="fa3"), record, runner(FlashAttentionBackend(3)))


def test_flashinfer_packs_by_our_backend_alone():
    stock, record = runner(FlashInferAttnBackend()), SimpleNamespace()
    trees = C2TConfig(mode="tree", packing="flashinfer")
    assert choose(trees, record, runner(RaggedFlashInfer())).masked
    with pytest.raises(ConfigError, match=r"packing flashinfer cannot be had: .*latent"):
        choose(trees, record, runner(RaggedFlashInfer(), use_mla_backend=True))
    # not ours: it would ignore the layout
    with pytest.raises(ConfigError, match="packing flashinfer cannot be had: FlashInferAttnBackend verifies requests"):
        choose(trees, record, stock)
    with pytest.raises(ConfigError, match="packing triton cannot be had: the attention backend is RaggedFlashInfer"):
        choose(C2TConfig(packing="triton"), record, runner(RaggedFlashInfer()))


def test_a_backend_that_the_server_does_not_run():
    with pytest.raises(ConfigError, match="packing triton cannot be had: TorchNativeAttnBackend verifies"):
        choose(C2TConfig(packing="triton"), SimpleNamespace(), runner(TorchNativeAttnBackend()))
    with pytest.raises(ConfigError, match="packing fa3 cannot be had: the attention backend is RaggedAttention"):
        choose(C2TConfig(packing="fa3"), SimpleNamespace(), runner(RaggedAttention()))
    assert choose(C2TConfig(packing="off"), SimpleNamespace(), runner(TorchNativeAttnBackend())) == Choice(
        None, "as asked for"
    )


@pytest.mark.parametrize("backend", [TorchNativeAttnBackend(), FlashAttentionBackend(3)])
def test_tree_attention_is_for_ragged_triton(backend: Any):
    record, model = SimpleNamespace(), runner(backend)
    for config in (C2TConfig(attention="tree"), C2TConfig(attention="tree", mode="tree")):
        with pytest.raises(ConfigError, match="--speculative-c2t-attention tree is a kernel of packing triton, which"):
            start(config, record, SimpleNamespace(model_runner=model))


@pytest.mark.parametrize(
    ("needed", "captured", "expected"),
    [
        (1, [], 1),
        (9, [], 9),
        (3, [5, 10, 20], 5),
        (5, [5, 10, 20], 5),
        (11, [5, 10, 20], 20),  # padding requests of the graph included
        (22, [5, 10, 20], 22),  # too large for every graph: eager
    ],
)
def test_rows(needed: int, captured: list[int], expected: int):
    assert rows_to_compute(needed, captured) == expected


@given(st.lists(st.integers(1, 64), max_size=8, unique=True).map(sorted), st.integers(1, 80))
def test_a_planner_counts_on_the_rows_that_are_computed(captured: list[int], needed: int):
    assert padded(torch.tensor([needed]), captured).tolist() == [rows_to_compute(needed, captured)]


class GraphRunner:
    """What SGLang's has of the two."""

    capture_num_tokens = (5, 10, 20)

    def __init__(self, ragged_verify_mode: bool, masked: bool = False) -> None:
        self.ragged_verify_mode = ragged_verify_mode
        algorithm = SimpleNamespace(packing=Choice("triton", "", masked))
        self.model_runner = SimpleNamespace(spec_algorithm=algorithm)

    def get_spec_info(self, num_tokens: int) -> SimpleNamespace | None:
        return SimpleNamespace(ragged_verify_layout=None, custom_mask="mask") if num_tokens else None

    def _capture_ragged_verify_layout(self, num_tokens: int) -> str:
        return f"layout of {num_tokens}"


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_graphs_are_captured_with_a_layout(ragged: bool, masked: bool):
    get_spec_info = with_capture_layout(GraphRunner.get_spec_info)
    spec_info = get_spec_info(GraphRunner(ragged, masked), 10)
    expected = ("layout of 10" if ragged else None, "mask" if masked or not ragged else None)
    assert (spec_info.ragged_verify_layout, spec_info.custom_mask) == expected
    assert get_spec_info(GraphRunner(ragged, masked), 0) is None


@pytest.mark.parametrize(
    ("graphs", "expected"), [(GraphRunner(True), (5, 10, 20)), (GraphRunner(False), []), (None, [])]
)
def test_tiers_are_those_of_the_packed_graphs(graphs: GraphRunner | None, expected: object):
    model_runner = SimpleNamespace(decode_cuda_graph_runner=graphs)
    target = SimpleNamespace(forward_batch_generation=None, model_runner=model_runner)
    assert PackedVerify(target).sizes() == expected


def test_other_forwards_of_the_target_are_left_alone():
    calls = []
    target = SimpleNamespace(forward_batch_generation=lambda *args, **keyword: calls.append((args, keyword)))
    own = target.forward_batch_generation
    packing = PackedVerify(target)
    assert target.forward_batch_generation is own
    with packing.verifying(None, None):  # type: ignore[arg-type]
        assert target.forward_batch_generation is not own
    target.forward_batch_generation("prefill", capture_hidden_mode="full")
    assert calls == [(("prefill",), {"capture_hidden_mode": "full"})]


@pytest.mark.parametrize(
    ("nodes_alone", "changes", "again"),
    [(True, {"attention_chunk_size": 8}, 1), (False, {"attention_chunk_size": 8}, 0)],
)
def test_masks_without_a_prefix_are_left_where_the_window_is_verified(
    nodes_alone: bool, changes: dict[str, Any], again: int
):
    """SGLang's kernel would read other trees' bits in them."""
    backend, made = PackedFa3(), []
    backend.c2t_nodes_alone = nodes_alone
    target = SimpleNamespace(model_runner=runner(backend, **changes), init_attention_backends=lambda: made.append(1))
    target.model_runner.spec_algorithm = SimpleNamespace()
    record = SimpleNamespace(_c2t={"mode": "tree"})
    assert start(C2TConfig(mode="tree"), record, target) is None
    assert len(made) == again
    assert record._c2t == {"mode": "tree"} | ({"packing": "off"} if again else {})


def test_a_graphs_rows_that_are_all_given_away_are_not_shared_out_anew(monkeypatch: pytest.MonkeyPatch):
    """SGLang would do so in each step, by two kernels more."""
    monkeypatch.syspath_prepend(str(SITE))
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    def shared_out(self: Any, **_: Any) -> Any:
        raise AssertionError("shared out anew")

    monkeypatch.setattr(RaggedVerifyLayout, "padded_to_bucket", shared_out)
    width, rows, slots = 5, 12, 4
    _, starts, lengths = pack_ragged(
        torch.tensor([2, 0, 3], dtype=torch.int32), [torch.zeros(3, width)], capacity=rows, pads=(0,), slots=slots
    )
    assert int(starts[-1]) == rows and int(lengths.max()) <= width
    captured = RaggedVerifyLayout(
        verify_lens=torch.zeros(slots, dtype=torch.int32),
        graph_num_tokens=rows,
        extend_start_loc=torch.zeros(slots, dtype=torch.int32),
        qo_indptr_device=torch.zeros(slots + 1, dtype=torch.int32),
    )
    runner = SimpleNamespace(_captured_ragged_layouts={rows: captured}, captured_req_width=width)
    DecodeCudaGraphRunner._stage_ragged_verify_layout(runner, layout_of(lengths, starts, rows, width), rows)
    assert torch.equal(captured.verify_lens, lengths) and torch.equal(captured.qo_indptr_device, starts)
    # of trees some rows are nobody's
    with pytest.raises(AssertionError, match="shared out anew"):
        DecodeCudaGraphRunner._stage_ragged_verify_layout(runner, layout_of(lengths, starts, rows), rows)
