"""The draft loop of tree mode on a made-up draft model that knows only what its key slots hold."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.engines.sglang.metrics import Counts  # noqa: E402
from tests.engines.sglang import test_tree_policies as policies  # noqa: E402

TOPK, DEPTH = 4, 4
SLOTS = policies.STATES * TOPK * DEPTH
PREFIX = 7


@pytest.fixture
def worker(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang.trees import worker

    return worker


class MadeUpModel:
    """Writes each token into its slot, as keys, and reads the branch's own slots up to the newest, as attention does.

    Its hidden state is made of the tokens above.
    """

    def __init__(self, pool: Any) -> None:
        self.token_to_kv_pool = pool
        self.model_config = SimpleNamespace(model_is_mrope=False)
        self.slots = torch.arange(SLOTS).view(policies.STATES, TOPK, DEPTH)
        self.forwards = 0

    def forward(self, batch: Any) -> Any:
        self.token_to_kv_pool.k_buffer[0][batch.out_cache_loc, 0] = batch.input_ids.float()
        assert torch.equal(batch.out_cache_loc.view(-1, TOPK), self.slots[:, :, self.forwards])
        assert (batch.positions == PREFIX + self.forwards).all()
        self.forwards += 1
        tokens = self.token_to_kv_pool.k_buffer[0][self.slots[:, :, : self.forwards]][..., 0].long().tolist()
        paths = [(state, *path) for state, paths in enumerate(tokens) for path in paths]
        assert torch.equal(batch.spec_info.hidden_states, states_of([path[:-1] for path in paths]))
        rows = [policies.logits_after(state, tuple(path)) for state, *path in paths]
        logits = SimpleNamespace(next_token_logits=torch.stack(rows), hidden_states=states_of(paths))
        return SimpleNamespace(logits_output=logits)


def states_of(paths: list[tuple[int, ...]]) -> Tensor:
    """A hidden state that no other path has: (paths, 1) float64."""
    return torch.tensor([[sum(token * 50.0**place for place, token in enumerate(path))] for path in paths]).double()


def draft(worker: Any, name: str, beta: float, **changes: Any) -> tuple[list[set[tuple[int, ...]]], int]:
    """Paths of each request's tree, and how many draft forwards there were."""
    made = object.__new__(type("Draft", (worker._TreeDraftMixin,), {}))
    pool = object.__new__(worker.MHATokenToKVPool)
    pool.k_buffer, pool.v_buffer = [torch.zeros(SLOTS, 1)], [torch.zeros(SLOTS, 1)]
    made.scorer = policies.grower(name, TOPK, DEPTH, TOPK * DEPTH, beta)
    made.counts = Counts(TOPK * DEPTH)
    made.draft_runner = MadeUpModel(pool)
    made.topk, made.speculative_num_steps = TOPK, DEPTH
    made.draft_attn_backend = SimpleNamespace(attn_backends=[object()] * (DEPTH - 1))
    for key, value in changes.items():
        setattr(made, key, value)
    where = torch.tensor([4, 1, 6])
    made.scorer.write_seed(where, torch.stack([policies.logits_after(s, ()) for s in range(policies.STATES)]))
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        out_cache_loc=made.draft_runner.slots.flatten(),
        req_pool_indices=where,
        positions=torch.full((policies.STATES * TOPK,), PREFIX),
        spec_info=SimpleNamespace(hidden_states=states_of([(state,) for state in range(policies.STATES)])),
        moe_num_token_non_padded=None,
    )
    fields: list[Tensor] = made.draft_forward(batch)[:3]
    trees = [policies.paths_of(*row) for row in zip(*(field.tolist() for field in fields), strict=True)]
    return trees, made.draft_runner.forwards


@pytest.mark.parametrize(("name", "beta"), [("c2t", 0.0), ("c2t", 0.1), ("prob", 0.02)])
def test_each_node_is_drafted_from_the_tokens_above_it(worker: Any, name: str, beta: float):
    expected = policies.trees_of(policies.core_policy(name, TOPK, DEPTH, TOPK * DEPTH, beta))
    assert draft(worker, name, beta) == (expected, DEPTH - 1)


def test_as_in_stock_sglang_branches_read_other_tokens(worker: Any):
    """The difference that policy eagle2 keeps: keys are not those of the hidden state's path."""
    with pytest.raises(AssertionError):
        draft(worker, "c2t", 0.0, _inherits=False)


def test_drafting_ends_when_no_node_is_left(worker: Any):
    nothing = [set[tuple[int, ...]]()] * policies.STATES
    assert draft(worker, "prob", 1.0, _may_end_early=True) == (nothing, 0)
    assert draft(worker, "prob", 1.0) == (nothing, DEPTH - 1), "a captured graph has to hold all steps"


def test_an_early_end_changes_no_tree(worker: Any):
    ended, forwards = draft(worker, "prob", 0.2, _may_end_early=True)
    assert ended == draft(worker, "prob", 0.2)[0]
    assert 0 < forwards < DEPTH - 1


def test_only_small_batches_end_early(worker: Any, monkeypatch: pytest.MonkeyPatch):
    assert worker.EARLY_END_BATCH == 4
    for batch, forwards in ((policies.STATES, 0), (policies.STATES - 1, DEPTH - 1)):
        monkeypatch.setattr(worker, "EARLY_END_BATCH", batch)
        assert draft(worker, "prob", 1.0, _may_end_early=True)[1] == forwards


@pytest.mark.parametrize(("nodes", "width"), [(0, 3), (2, 3), (3, 6), (5, 6), (6, 11), (10, 11), (11, 21), (20, 21)])
def test_the_window_of_the_largest_tree_is_entered(worker: Any, nodes: int, width: int):
    from c2t_plugin.engines.sglang.windows import Windows, widths

    made = object.__new__(type("Draft", (worker._TreeDraftMixin,), {}))
    made.speculative_num_draft_tokens = 21
    keep = torch.zeros(3, 40, dtype=torch.bool)
    keep[1, :nodes] = True
    assert made._width(keep) == 21
    entered: list[int] = []
    made.windows = Windows(None, widths(21, "tree"))
    made.windows.enter = entered.append
    assert ([made._width(keep)], entered) == ([width], [width])


def test_ranks_verify_the_first_ones_trees(worker: Any, monkeypatch: pytest.MonkeyPatch):
    """Links, choice and tokens: each rank may have rounded its draft's logits its own way, and planned by them."""
    made = object.__new__(type("Draft", (worker._TreeDraftMixin,), {}))
    made.topk, made.speculative_num_steps, made.speculative_num_draft_tokens = TOPK, 1, 5
    made.tree_mask_mode, made.packed = "form", True
    made.scorer = policies.grower("c2t", TOPK, 1, TOPK)
    backend = SimpleNamespace()
    runner = SimpleNamespace(attn_backend=backend, decode_cuda_graph_runner=None)
    made.target_worker = SimpleNamespace(model_runner=runner)
    made.planner = SimpleNamespace(keep=lambda sizes, own, keys: sizes - 1)
    mine = (torch.full((1, 4), -1), torch.ones(1, 4, dtype=torch.bool), torch.arange(4)[None])
    planned = torch.tensor([[True, True, True, False]])
    theirs = (mine[0], torch.tensor([[True, False, True, True]]), mine[2] + 10)
    sent = []

    def broadcast(tensor: Tensor, src: int) -> Tensor:
        sent.append(tensor)
        assert src == 0
        return theirs[len(sent) - 1]

    group = SimpleNamespace(world_size=2, broadcast=broadcast)
    monkeypatch.setattr("c2t_plugin.engines.sglang.worker.get_tp_group", lambda: group)
    monkeypatch.setattr(
        worker,
        "build_verify_input",
        lambda _batch, _draft, trees, width, **more: SimpleNamespace(trees=trees, width=width, more=more),
    )
    key = torch.tensor([[0.9, 0.8, 0.7, 0.6]])
    found = made._build_verify_input(SimpleNamespace(req_pool_indices=torch.tensor([2])), None, *mine, key)
    for ours, expected in zip(sent, (mine[0], planned, mine[2]), strict=True):
        assert torch.equal(ours, expected)
    assert found.trees == theirs
    assert (found.width, found.more["packed"], found.more["attn_backend"]) == (5, True, backend)
    assert found.c2t_wanted.tolist() == [4]


def test_a_pool_whose_slots_cannot_be_moved_is_refused(worker: Any):
    with pytest.raises(worker.ConfigError, match="keeps its keys in a object, whose slots tree mode cannot move"):
        worker.kv_buffers(object())
