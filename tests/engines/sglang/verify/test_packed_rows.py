"""What belongs to rows goes with them: slots of what SGLang keeps by slot, and positions of three axes."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

import sglang  # noqa: E402

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_kernels import pack_ragged, scatter_ragged  # noqa: E402
from c2t_plugin.engines.sglang.step import Step  # noqa: E402
from c2t_plugin.engines.sglang.verify.choice import takes_axes  # noqa: E402
from c2t_plugin.engines.sglang.verify.packing import PackedVerify, whole_windows  # noqa: E402

WIDTH, LAYERS, EXPERTS = 4, 3, 2
KEPT = [0, 3, 1]
REQUESTS = len(KEPT)
# of the window: the slot of each token, none of which is its place
SLOTS = torch.randperm(100, generator=torch.Generator().manual_seed(0))[: REQUESTS * WIDTH] + 1


def packed(
    monkeypatch: pytest.MonkeyPatch, rows: int, axes: torch.Tensor | None = None, **of: Any
) -> tuple[Any, dict[str, Any]]:
    """The forward batch of packed rows as far as C2T makes it, and what SGLang is given to make it with. of: graphs,
    and whether rows are a tree's."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    given: dict[str, Any] = {}

    def init_new(batch: Any, _runner: Any, **named: Any) -> Any:
        given.update(named)
        slots = {"out_cache_loc": batch.out_cache_loc, "out_cache_loc_virtual": None}
        return SimpleNamespace(**slots, spec_info=batch.spec_info)

    monkeypatch.setattr(ForwardBatch, "init_new", init_new)
    places = torch.arange(REQUESTS * WIDTH)
    window = SimpleNamespace(
        draft_token=1000 + places, positions=2000 + places, draft_token_num=WIDTH, custom_mask=None
    )
    batch = SimpleNamespace(spec_info=window, out_cache_loc=SLOTS, input_ids=window.draft_token)
    target = SimpleNamespace(model_runner=SimpleNamespace(decode_cuda_graph_runner=of.get("graphs")))
    slots = {"out_cache_loc": SLOTS, "out_cache_loc_virtual": None}
    uniform = SimpleNamespace(mrope_positions=axes, capture_hidden_mode=None, spec_info=window, **slots)
    step = Step(torch.tensor(KEPT, dtype=torch.int32), rows=rows)
    made = PackedVerify(target, masked=of.get("masked", False)).pack(batch, step, uniform)[0]
    assert uniform.spec_info is window and not hasattr(window, "ragged_verify_layout")
    return made, given


@pytest.fixture
def engine(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's modules can be imported."""
    monkeypatch.syspath_prepend(str(SITE))


def capturer() -> Any:
    """SGLang's, without what it asks a model for."""
    from sglang.srt.state_capturer.base import BaseTopkCapturer

    made = BaseTopkCapturer.__new__(BaseTopkCapturer)
    made.topk_size = EXPERTS
    made.device_cache = SimpleNamespace(buffer=torch.zeros(REQUESTS * WIDTH, LAYERS, EXPERTS, dtype=torch.int32))
    made.host_cache = SimpleNamespace(buffer=torch.full((101, LAYERS, EXPERTS), -1, dtype=torch.int32))
    return made


def experts(tokens: torch.Tensor) -> torch.Tensor:
    """(rows, layers, experts) that tokens are routed to."""
    return (tokens[:, None, None] * LAYERS + torch.arange(LAYERS)[:, None]) * EXPERTS + torch.arange(EXPERTS)


def kept_by_slot(batch: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What a request that has accepted all of its kept tokens is told: of each in turn."""
    capture = capturer()
    capture.device_cache.buffer[: len(tokens)] = experts(tokens).int()
    capture.on_forward_end(batch, can_run_graph=False, cuda_graph_batch=None)
    own = torch.cat([SLOTS.view(-1, WIDTH)[i, : kept + 1] for i, kept in enumerate(KEPT)])
    return capture.host_cache.buffer[own]


@pytest.mark.parametrize("rows", [sum(KEPT) + REQUESTS, 10, REQUESTS * WIDTH])
def test_routed_experts_are_those_of_the_window(engine: None, monkeypatch: pytest.MonkeyPatch, rows: int):
    tokens = 1000 + torch.arange(REQUESTS * WIDTH)
    uniform = SimpleNamespace(out_cache_loc=SLOTS, out_cache_loc_virtual=None)
    expected = kept_by_slot(uniform, tokens)
    batch, _ = packed(monkeypatch, rows)
    assert torch.equal(kept_by_slot(batch, batch.spec_info.draft_token), expected)


def test_experts_of_packed_rows_by_the_place_in_the_window_are_seen(engine: None, monkeypatch: pytest.MonkeyPatch):
    expected = kept_by_slot(SimpleNamespace(out_cache_loc=SLOTS, out_cache_loc_virtual=None), 1000 + torch.arange(12))
    batch, _ = packed(monkeypatch, sum(KEPT) + REQUESTS)
    batch.out_cache_loc = SLOTS[: len(batch.out_cache_loc)]
    assert not torch.equal(kept_by_slot(batch, batch.spec_info.draft_token), expected)


@pytest.mark.parametrize("padded", [0, 5])
def test_positions_of_three_axes_go_with_their_rows(engine: None, monkeypatch: pytest.MonkeyPatch, padded: int):
    axes = torch.arange(3)[:, None] * 100 + torch.arange(REQUESTS * WIDTH + padded)
    batch, given = packed(monkeypatch, 10, axes)
    places = batch.spec_info.draft_token - 1000
    assert torch.equal(given["spec_mrope_positions"], torch.arange(3)[:, None] * 100 + places)
    assert torch.equal(batch.spec_info.positions, 2000 + places)


def test_without_them_sglang_is_given_none(engine: None, monkeypatch: pytest.MonkeyPatch):
    assert "spec_mrope_positions" not in packed(monkeypatch, 7)[1]


def graphs(admits: bool) -> SimpleNamespace:
    """Of a pass of the whole window, with room for two requests more."""
    return SimpleNamespace(
        ragged_verify_mode=True,
        capture_num_tokens=[REQUESTS * WIDTH],
        _ragged_capture_slots=lambda rows: REQUESTS + 2,
        can_run_graph=lambda batch: admits,
    )


@pytest.mark.parametrize(
    ("of", "empty"),
    [({}, 0), ({"graphs": graphs(True)}, 2), ({"graphs": graphs(False)}, 0)],
    ids=["no graphs", "graph", "no graph of that size"],
)
def test_a_whole_window_is_sglangs_own_pass_with_lengths(
    engine: None, monkeypatch: pytest.MonkeyPatch, of: dict[str, Any], empty: int
):
    """Nothing is packed, and no forward batch is made: at a few requests most steps verify all that they draft."""
    batch, given = packed(monkeypatch, REQUESTS * WIDTH, **of)
    layout = batch.spec_info.ragged_verify_layout
    assert not given and batch.out_cache_loc is SLOTS
    assert batch.spec_info.draft_token.tolist() == list(range(1000, 1000 + REQUESTS * WIDTH))
    assert layout.verify_lens.tolist() == [WIDTH] * REQUESTS + [0] * empty
    assert layout.qo_indptr_device.tolist() == [0, 4, 8, 12, *[12] * empty]
    assert layout.graph_num_tokens == REQUESTS * WIDTH and batch.spec_info.custom_mask is None


@pytest.mark.parametrize("kept", [[0, 3, 1], [-1, 0, 0], [3, 3, 3]])
def test_packed_it_would_be_the_same(kept: list[int]):
    sources = [SLOTS.view(-1, WIDTH), 5 * SLOTS.view(-1, WIDTH)]
    counts = torch.tensor(kept, dtype=torch.int32)
    found = pack_ragged(counts, sources, capacity=REQUESTS * WIDTH, pads=(0, 0), slots=REQUESTS + 2)
    starts, lengths = whole_windows(REQUESTS, WIDTH, REQUESTS + 2, counts.device)
    assert all(torch.equal(value, source.flatten()) for value, source in zip(found.values, sources, strict=True))
    assert torch.equal(found.cu_seqlens, starts) and torch.equal(found.lengths, lengths)


@pytest.mark.parametrize("nobodys", [0, 3])
def test_the_output_of_whole_windows_stays_where_it_is(nobodys: int):
    starts, _ = whole_windows(REQUESTS, WIDTH, REQUESTS, torch.device("cpu"))
    rows = torch.randn(REQUESTS * WIDTH + nobodys, 5)
    output = SimpleNamespace(next_token_logits=rows, hidden_states=None)
    PackedVerify(None).scatter(output, starts, WIDTH)
    assert output.next_token_logits.data_ptr() == rows.data_ptr() and output.hidden_states is None
    assert torch.equal(output.next_token_logits, scatter_ragged(rows, starts, WIDTH, fill=0).flatten(0, 1))


def test_that_of_trees_is_put_in_its_place():
    starts = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    rows = torch.randn(REQUESTS * WIDTH, 5)
    output = SimpleNamespace(next_token_logits=rows, hidden_states=rows + 1)
    PackedVerify(None, masked=True).scatter(output, starts, WIDTH)
    assert torch.equal(output.next_token_logits.view(REQUESTS, WIDTH, 5)[1, :3], rows[2:5])
    assert torch.equal(output.hidden_states.view(REQUESTS, WIDTH, 5)[2, :1], rows[5:6] + 1)


def test_trees_are_packed_though_they_have_as_many_rows(engine: None, monkeypatch: pytest.MonkeyPatch):
    """Their spare rows are nobody's."""
    batch, given = packed(monkeypatch, REQUESTS * WIDTH, masked=True)
    assert given and batch.spec_info.ragged_verify_layout.verify_lens.tolist() == [kept + 1 for kept in KEPT]


def test_what_this_release_takes(engine: None):
    assert takes_axes() == (tuple(map(int, sglang.__version__.split(".")[:3])) > (0, 5, 17))
