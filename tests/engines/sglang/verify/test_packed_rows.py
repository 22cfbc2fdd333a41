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
from c2t_plugin.engines.sglang.step import Step  # noqa: E402
from c2t_plugin.engines.sglang.verify.choice import takes_axes  # noqa: E402
from c2t_plugin.engines.sglang.verify.packing import PackedVerify  # noqa: E402

WIDTH, LAYERS, EXPERTS = 4, 3, 2
KEPT = [0, 3, 1]
REQUESTS = len(KEPT)
# of the window: the slot of each token, none of which is its place
SLOTS = torch.randperm(100, generator=torch.Generator().manual_seed(0))[: REQUESTS * WIDTH] + 1


def packed(monkeypatch: pytest.MonkeyPatch, rows: int, axes: torch.Tensor | None = None) -> tuple[Any, dict[str, Any]]:
    """The forward batch of packed rows as far as C2T makes it, and what SGLang is given to make it with."""
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
    target = SimpleNamespace(model_runner=SimpleNamespace(decode_cuda_graph_runner=None))
    uniform = SimpleNamespace(mrope_positions=axes, capture_hidden_mode=None)
    step = Step(torch.tensor(KEPT, dtype=torch.int32), rows=rows)
    return PackedVerify(target).pack(batch, step, uniform)[0], given


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


def test_what_this_release_takes(engine: None):
    assert takes_axes() == (tuple(map(int, sglang.__version__.split(".")[:3])) > (0, 5, 17))
