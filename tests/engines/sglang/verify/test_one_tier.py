"""One number of packed rows on all ranks: SGLang's runner takes each rank's batch into one graph, idle ones too."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.engines.sglang.step import Step  # noqa: E402

WIDTH, MOST = 4, 8
TIERS = [size * WIDTH for size in (1, 2, 4, MOST)]


@pytest.fixture
def one_tier(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with SGLang's forward batches as plain records of what they are made from."""
    monkeypatch.syspath_prepend(str(SITE))
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from c2t_plugin.engines.sglang.verify import one_tier

    def init_new(batch: Any, _runner: Any, *, capture_hidden_mode: Any, **named: Any) -> Any:
        return SimpleNamespace(
            **vars(batch) | named,
            batch_size=len(batch.seq_lens),
            capture_hidden_mode=capture_hidden_mode,
            replace_embeds=None,
        )

    monkeypatch.setattr(ForwardBatch, "init_new", init_new)
    yield one_tier


def graphs_of() -> Any:
    """SGLang's runner of the target's graphs, captured for TIERS, without what it asks a model for."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    made = DecodeCudaGraphRunner.__new__(DecodeCudaGraphRunner)
    backend = SimpleNamespace(supports_ragged_verify_graph=True)
    own = {"ragged_verify_mode": True, "capture_num_tokens": TIERS, "max_bs": MOST, "captured_req_width": WIDTH}
    rest = {"require_mlp_sync": True, "require_mlp_tp_gather": True, "is_encoder_decoder": False}
    more = {"enable_pdmux": False, "disable_padding": False, "enable_two_batch_overlap": False}
    vars(made).update({**own, **rest, **more, "capture_hidden_mode": 2, "record_nolora_graph": False})
    vars(made)["model_runner"] = SimpleNamespace(
        attn_backend=backend, spec_algorithm=SimpleNamespace(is_ngram=lambda: False)
    )
    vars(made)["attn_backend"] = backend
    return made


class Target:
    """SGLang's target worker: notes what it computes. Its output has a row for each of the pass."""

    def __init__(self) -> None:
        self.passes: list[tuple[Any, bool]] = []
        self.model_runner = SimpleNamespace(decode_cuda_graph_runner=graphs_of())

    def forward_batch_generation(self, batch: Any = None, forward_batch: Any = None, **_: Any) -> Any:
        runs = self.model_runner.decode_cuda_graph_runner.can_run_graph(forward_batch)
        self.passes.append((forward_batch, runs))
        rows = torch.arange(len(forward_batch.input_ids))[:, None].float()
        return SimpleNamespace(
            can_run_cuda_graph=runs,
            logits_output=SimpleNamespace(next_token_logits=rows, hidden_states=rows.clone()),
        )


def batch_of(requests: int, counts: list[int]) -> tuple[Any, Any]:
    """A rank's batch before verification, and SGLang's forward batch of its window. counts: requests of all ranks."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    places = torch.arange(requests * WIDTH)
    window = SimpleNamespace(
        draft_token=1000 + places,
        positions=2000 + places,
        draft_token_num=WIDTH,
        num_tokens_per_req=WIDTH,
        custom_mask="a window's",
        ragged_verify_layout=None,
    )
    shared: dict[str, Any] = {
        "spec_info": window,
        "seq_lens": torch.full((requests,), 9),
        "forward_mode": ForwardMode.TARGET_VERIFY if requests else ForwardMode.IDLE,
        "can_run_decode_cuda_graph": True,
        # the same of an older release
        "can_run_dp_cuda_graph": True,
        "original_global_num_tokens_cpu": counts,
        "lora_ids": None,
        "input_ids": window.draft_token,
    }
    batch = SimpleNamespace(**shared, out_cache_loc=1 + places)
    uniform = SimpleNamespace(
        **shared, mrope_positions=None, capture_hidden_mode=2, batch_size=requests, replace_embeds=None
    )
    return batch, uniform


def verified(one_tier: Any, counts: list[int], kept: list[list[int]], needed: int) -> list[tuple[Any, bool, Any]]:
    """Of each rank the forward batch of its pass, whether SGLang replays a graph for it, and its output."""
    found = []
    for requests, own in zip(counts, kept, strict=True):
        target = Target()
        packing = one_tier.OneTier(target, False, "triton")
        packing.tier = packing.fitting(needed, max(counts))
        batch, uniform = batch_of(requests, counts)
        graphs = target.model_runner.decode_cuda_graph_runner
        step = Step(torch.tensor(own, dtype=torch.int32))
        with packing.verifying(batch, step) if requests else packing.idling(batch):
            # what SGLang asks before the pass, to prepare the graph of a window
            prepared = graphs.can_run_graph(uniform)
            result = target.forward_batch_generation(batch=None, forward_batch=uniform, is_verify=True)
        assert not (prepared and packing.tier)
        assert "can_run_graph" not in vars(graphs) and "forward_batch_generation" not in vars(target)
        found.append((*target.passes[-1], result.logits_output))
    return found


@pytest.mark.parametrize(
    ("kept", "needed", "tier"),
    [
        ([[3, 0, 2], []], 8, 8),
        ([[3, 0, 2], [1]], 9, 16),
        ([[], [3]], 1, 4),
        ([[0] * 8, [2, 2]], 8, 8),
        ([[3] * 8, [], [0, 1]], 32, 32),
    ],
)
def test_every_rank_replays_the_graph_of_the_same_rows(one_tier: Any, kept: list[list[int]], needed: int, tier: int):
    counts = [len(each) for each in kept]
    found = verified(one_tier, counts, kept, needed)
    for requests, own, (batch, runs, output) in zip(counts, kept, found, strict=True):
        layout = batch.spec_info.ragged_verify_layout
        assert runs and len(batch.input_ids) == layout.graph_num_tokens == tier
        assert batch.spec_info.custom_mask is None
        lengths = layout.verify_lens
        assert int(lengths.sum()) == tier and int(lengths.max()) <= WIDTH
        assert torch.equal(layout.qo_indptr_device[1:], lengths.cumsum(0).int())
        # links are cut, so only what was kept counts; the window's places are back
        assert output.next_token_logits.shape[0] == requests * WIDTH
        assert all(int(lengths[i]) > each for i, each in enumerate(own))


def test_a_rank_without_requests_writes_to_no_ones_slot(one_tier: Any):
    (_, (batch, runs, output)) = verified(one_tier, [3, 0], [[3, 0, 2], []], 8)
    assert runs and batch.forward_mode.is_target_verify()
    slots = min(8, MOST)
    assert batch.batch_size == slots == len(batch.spec_info.ragged_verify_layout.verify_lens)
    for tokens in (batch.input_ids, batch.out_cache_loc, batch.spec_info.positions):
        assert torch.equal(tokens, torch.zeros(8, dtype=torch.int64))
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [1] * slots and batch.seq_lens_sum == slots
    assert batch.req_pool_indices.tolist() == [0] * slots
    assert output.next_token_logits.shape[0] == output.hidden_states.shape[0] == 0


def test_where_one_rank_has_no_graph_nobody_replays_one(one_tier: Any):
    counts = [MOST + 1, 2, 0]
    found = verified(one_tier, counts, [[1] * (MOST + 1), [3, 0], []], MOST + 1)
    assert [runs for _, runs, _ in found] == [False] * 3
    # SGLang's own pass over whole windows
    assert [len(batch.input_ids) for batch, *_ in found] == [count * WIDTH for count in counts]


def test_an_idle_rank_as_sglang_has_it_would_take_another_graph(one_tier: Any):
    """The fault that the fabricated rows are for."""
    _, uniform = batch_of(0, [3, 0])
    target = Target()
    assert target.forward_batch_generation(forward_batch=uniform).can_run_cuda_graph
    assert len(target.passes[0][0].input_ids) == 0


@pytest.mark.parametrize(
    ("attention", "gathers", "all_to_all", "server_args", "linear", "reason"),
    [
        (1, True, False, {}, None, None),
        (2, True, False, {}, None, "a group of ranks attends to the same requests"),
        (1, False, False, {}, None, "ranks take graphs of their own sizes"),
        (1, True, True, {}, None, "from all to all"),
        (1, True, False, {"enable_return_routed_experts": True}, None, "routed experts"),
        (1, True, False, {}, object(), "linear layers"),
    ],
)
def test_what_keeps_ranks_from_one_number_of_rows(
    one_tier: Any,
    monkeypatch: pytest.MonkeyPatch,
    attention: int,
    gathers: bool,
    all_to_all: bool,
    server_args: dict[str, Any],
    linear: Any,
    reason: str | None,
):
    monkeypatch.setattr(one_tier, "get_parallel", lambda: SimpleNamespace(attn_tp_size=attention))
    monkeypatch.setattr(one_tier, "require_mlp_tp_gather", lambda: gathers)
    backend = SimpleNamespace(is_none=lambda: not all_to_all)
    monkeypatch.setattr(one_tier, "get_moe_a2a_backend", lambda: backend)
    found = one_tier.obstacle("fa3", SimpleNamespace(**server_args), linear)
    assert found is None if reason is None else found is not None and reason in found
    monkeypatch.setattr(one_tier, "require_mlp_tp_gather", lambda server_args: gathers and server_args is not None)
    assert found == one_tier.obstacle("fa3", SimpleNamespace(**server_args), linear)
    assert "nothing proves there" in one_tier.obstacle("auto", SimpleNamespace(**server_args), linear)
