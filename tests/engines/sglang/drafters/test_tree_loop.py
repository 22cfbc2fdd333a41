"""The draft loop of tree mode on a made-up draft model that knows only what its key slots hold."""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.engines.sglang.metrics import Counts  # noqa: E402
from c2t_plugin.engines.sglang.parts import Parts  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from c2t_plugin.planner.tree_planner import TreePlanner  # noqa: E402
from tests.engines.sglang import test_tree_policies as policies  # noqa: E402

TOPK, DEPTH = 4, 4
CURVE = CostCurve(verify=((1, 1.0), (9, 1.8)), draft=((1, 0.1), (36, 0.2)))
PREFIX = 7


@pytest.fixture
def tree(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang.drafters import tree

    return tree


def drafter_of(tree: Any, scorer: Any, worker: Any) -> Any:
    parts = Parts(scorer, Counts(TOPK * DEPTH), None, None, {"policy": "c2t"})
    return tree.TreeDrafter(worker, parts)


class MadeUpModel:
    """Writes each token into its slot, as keys, and reads the branch's own slots up to the newest, as attention does.

    Its hidden state is made of the tokens above.
    """

    def __init__(self, pool: Any, width: int) -> None:
        self.token_to_kv_pool = pool
        self.model_config = SimpleNamespace(model_is_mrope=False)
        slots = policies.STATES * width * DEPTH
        pool.k_buffer, pool.v_buffer = [torch.zeros(slots, 1)], [torch.zeros(slots, 1)]
        self.slots = torch.arange(slots).view(policies.STATES, width, DEPTH)
        self.forwards, self.width = 0, width

    def forward(self, batch: Any) -> Any:
        self.token_to_kv_pool.k_buffer[0][batch.out_cache_loc, 0] = batch.input_ids.float()
        assert torch.equal(batch.out_cache_loc.view(-1, self.width), self.slots[:, :, self.forwards])
        assert batch.positions.tolist() == [PREFIX + self.forwards] * policies.STATES * self.width
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


def draft(
    tree: Any, name: str, beta: float, width: int = TOPK, **changes: Any
) -> tuple[list[set[tuple[int, ...]]], int]:
    """Paths of each request's tree, and how many draft forwards there were."""
    runner = MadeUpModel(object.__new__(tree.MHATokenToKVPool), width)
    worker = SimpleNamespace(
        draft_runner=runner,
        topk=width,
        speculative_num_steps=DEPTH,
        draft_attn_backend=SimpleNamespace(attn_backends=[object()] * (DEPTH - 1)),
    )
    made = drafter_of(tree, policies.grower(name, TOPK, DEPTH, TOPK * DEPTH, beta, narrow=1), worker)
    for key, value in changes.items():
        setattr(made, key, value)
    where = torch.tensor([4, 1, 6])
    made.scorer.write_seed(where, torch.stack([policies.logits_after(s, ()) for s in range(policies.STATES)]))
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        out_cache_loc=runner.slots.flatten(),
        req_pool_indices=where,
        positions=torch.full((policies.STATES * width,), PREFIX),
        spec_info=SimpleNamespace(hidden_states=states_of([(state,) for state in range(policies.STATES)])),
        moe_num_token_non_padded=None,
    )
    fields: list[Tensor] = made.loop(batch, None)[:3]
    trees = [policies.paths_of(*row) for row in zip(*(field.tolist() for field in fields), strict=True)]
    return trees, runner.forwards


@pytest.mark.parametrize(("name", "beta"), [("c2t", 0.0), ("c2t", 0.1), ("prob", 0.02)])
def test_each_node_is_drafted_from_the_tokens_above_it(tree: Any, name: str, beta: float):
    expected = policies.trees_of(policies.core_policy(name, TOPK, DEPTH, TOPK * DEPTH, beta))
    assert draft(tree, name, beta) == (expected, DEPTH - 1)


@pytest.mark.parametrize("depth", [1, 2, DEPTH])
@pytest.mark.parametrize("width", [1, TOPK])
def test_a_step_may_draft_chains_and_end_after_any_layer(tree: Any, width: int, depth: int):
    expected = policies.trees_of(policies.core_policy("c2t", width, depth, TOPK * DEPTH, 0.0))
    found = draft(tree, "c2t", 0.0, width, _planner=SimpleNamespace(depth=depth))
    assert found == (expected, depth - 1)
    assert len({len(path) for paths in expected for path in paths}) == depth


def test_slots_and_attention_are_of_the_steps_width_while_it_drafts(tree: Any, monkeypatch: pytest.MonkeyPatch):
    attention, planner = SimpleNamespace(topk=TOPK), SimpleNamespace(width=1)
    worker = SimpleNamespace(topk=TOPK, draft_attn_backend=attention)
    made = drafter_of(tree, None, worker)
    monkeypatch.setattr(tree.ranks, "alone", lambda: True)
    monkeypatch.setattr(made, "_planner", planner)
    for width in (1, TOPK):
        planner.width = width
        with made.drafting():
            assert (worker.topk, attention.topk) == (width, width)
        assert (worker.topk, attention.topk) == (TOPK, TOPK)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "each step drafts chains, or trees 4 wide, up to 6 deep, as the planner says"),
        ({"attention": "Triton"}, "every step drafts 4 wide and 6 deep: the draft's attention, and CUDA graphs where"),
        ({"alone": False}, "every step drafts 4 wide and 6 deep: ranks have to take the same steps"),
        ({"topk": 1}, "every step drafts 1 wide and 6 deep: no draft pass is wider than another"),
        # then SGLang makes no attention for the draft
        ({"steps": 1, "attention": "NoneType"}, "every step drafts 4 wide and 1 deep: no draft pass is wider"),
        ({"packing": None}, "every step drafts 4 wide and 6 deep: every node is verified"),
    ],
)
def test_where_shapes_are_planned(
    tree: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    says: str,
):
    found = {
        "topk": 4,
        "steps": 6,
        "alone": True,
        "attention": "IntelAMXMultiStepDraftBackend",
        "packing": 1,
        **changed,
    }
    topk, steps = found["topk"], found["steps"]
    planner = TreePlanner(None, None, topk=topk, steps=steps, most=24, device=torch.device("cpu"))
    monkeypatch.setattr(tree.ranks, "alone", lambda: found["alone"])
    attention = type(found["attention"], (), {})()
    worker = SimpleNamespace(topk=topk, speculative_num_steps=steps, draft_attn_backend=attention)
    made = drafter_of(tree, None, worker)
    made._planner = planner
    with caplog.at_level(logging.INFO):
        made.vary_shapes(packed=found["packing"] is not None)
    assert (planner.shapes is not None) == says.startswith("each")
    assert caplog.text.count(says) == 1
    # where packed rows turn out to be wrong
    made.vary_shapes(packed=False)
    assert planner.shapes is None


def test_as_in_stock_sglang_branches_read_other_tokens(tree: Any):
    """The difference that policy eagle2 keeps: keys are not those of the hidden state's path."""
    with pytest.raises(AssertionError):
        draft(tree, "c2t", 0.0, inherits=False)


def test_drafting_ends_when_no_node_is_left(tree: Any):
    nothing = [set[tuple[int, ...]]()] * policies.STATES
    assert draft(tree, "prob", 1.0, may_end_early=True) == (nothing, 0)
    assert draft(tree, "prob", 1.0) == (nothing, DEPTH - 1), "a captured graph has to hold all steps"


def test_an_early_end_changes_no_tree(tree: Any):
    ended, forwards = draft(tree, "prob", 0.2, may_end_early=True)
    assert ended == draft(tree, "prob", 0.2)[0]
    assert 0 < forwards < DEPTH - 1


def test_only_small_batches_end_early(tree: Any, monkeypatch: pytest.MonkeyPatch):
    assert tree.EARLY_END_BATCH == 4
    for batch, forwards in ((policies.STATES, 0), (policies.STATES - 1, DEPTH - 1)):
        monkeypatch.setattr(tree, "EARLY_END_BATCH", batch)
        assert draft(tree, "prob", 1.0, may_end_early=True)[1] == forwards


@pytest.mark.parametrize(("nodes", "width"), [(0, 3), (2, 3), (3, 6), (5, 6), (6, 11), (10, 11), (11, 21), (20, 21)])
def test_the_window_of_the_largest_tree_is_entered(tree: Any, nodes: int, width: int):
    from c2t_plugin.engines.sglang.verify.windows import Windows, widths

    made = drafter_of(tree, None, SimpleNamespace(speculative_num_draft_tokens=21))
    keep = torch.zeros(3, 40, dtype=torch.bool)
    keep[1, :nodes] = True
    assert made._width(keep) == 21
    entered: list[int] = []
    windows = made._parts.windows = Windows(None, widths(21, "tree"))
    windows.enter = entered.append
    assert ([made._width(keep)], entered) == ([width], [width])


@pytest.mark.parametrize(
    ("own", "windows", "sizes"),
    [
        ([True, False, False], True, [3, 1, 3]),
        ([True, False, False], False, [6, 1, 3]),
        # among themselves they are as large as they like
        ([True, True, True], True, [6, 1, 3]),
        ([False, False, False], True, [6, 1, 3]),
        ([False, True, False], True, [6, 1, 3]),
    ],
)
def test_ones_own_threshold_does_not_widen_the_window_of_others(
    tree: Any, own: list[bool], windows: bool, sizes: list[int]
):
    """The surest nodes are left, which are closed under ancestors."""
    scorer = policies.grower("c2t", TOPK, DEPTH, 6)
    made = drafter_of(tree, scorer, None)
    made._parts.windows = SimpleNamespace() if windows else None
    slots = torch.arange(3)
    scorer.set_requests(slots, [0.0 if each else None for each in own], [None] * 3)
    reqs = [SimpleNamespace(_c2t=SimpleNamespace(own_beta=each)) for each in own]
    keep = torch.arange(8) < torch.tensor([6, 1, 3])[:, None]
    key = torch.linspace(0.9, 0.1, 8).expand(3, 8)
    found = made._planned(torch.full((3, 8), -1), keep, key, reqs, slots)
    assert found.sum(1).tolist() == sizes
    assert found.equal(keep & (torch.arange(8) < torch.tensor(sizes)[:, None]))


@pytest.mark.parametrize(
    ("policy", "sizes", "nodes"),
    [
        ("c2t", [8, 16], [6, 3, 4]),
        ("c2t", [8], [6, 1, 3]),  # no graph is as large
        ("c2t", [], [6, 1, 3]),
        # whose trees nothing cuts
        ("eagle2", [8, 16], [6, 1, 3]),
    ],
)
def test_rows_that_a_graph_leaves_over_are_the_next_best_nodes(
    tree: Any, policy: str, sizes: list[int], nodes: list[int]
):
    scorer = policies.grower(policy, TOPK, DEPTH, 6)
    made = drafter_of(tree, scorer, None)
    made._parts.packing = SimpleNamespace(sizes=lambda: sizes)
    slots, keep = torch.arange(3), torch.arange(8) < torch.tensor([6, 1, 3])[:, None]
    # whose next ones are 0.65, 0.55, ... in the second tree and 0.6, 0.5, ... in the third
    key = torch.linspace(0.9, 0.2, 8) - torch.tensor([0.0, 0.15, 0.0])[:, None]
    found = made._planned(torch.full((3, 8), -1), keep, key, [], slots)
    assert found.sum(1).tolist() == nodes
    assert found.equal(torch.arange(8) < torch.tensor(nodes)[:, None])


def test_ranks_verify_the_first_ones_trees(tree: Any, monkeypatch: pytest.MonkeyPatch):
    """Links, choice and tokens: each rank may have rounded its draft's logits its own way, and planned by them."""
    from c2t_plugin.engines.sglang import ranks

    backend = SimpleNamespace()
    runner = SimpleNamespace(attn_backend=backend, decode_cuda_graph_runner=None)
    worker = SimpleNamespace(
        topk=TOPK,
        speculative_num_steps=1,
        speculative_num_draft_tokens=5,
        tree_mask_mode="form",
        target_worker=SimpleNamespace(model_runner=runner),
    )
    made = drafter_of(tree, policies.grower("c2t", TOPK, 1, TOPK), worker)
    made._parts.packing = SimpleNamespace()
    made._planner = SimpleNamespace(keep=lambda sizes, own, keys: sizes - 1, shapes=None, depth=1)
    mine = (torch.full((1, 4), -1), torch.ones(1, 4, dtype=torch.bool), torch.arange(4)[None])
    planned = torch.tensor([[True, True, True, False]])
    theirs = (mine[0], torch.tensor([[True, False, True, True]]), mine[2] + 10)
    sent = []

    def broadcast(tensor: Tensor, src: int) -> Tensor:
        sent.append(tensor)
        assert src == 0
        return theirs[len(sent) - 1]

    group = SimpleNamespace(world_size=2, broadcast=broadcast)
    monkeypatch.setattr(ranks, "get_tp_group", lambda: group)
    monkeypatch.setattr(
        tree,
        "build_verify_input",
        lambda _batch, _draft, trees, width, **more: SimpleNamespace(trees=trees, width=width, more=more),
    )
    key = torch.tensor([[0.9, 0.8, 0.7, 0.6]])
    batch = SimpleNamespace(reqs=[], req_pool_indices=torch.tensor([2]))
    # with SGLang's arguments, and what it notes on what it gets for them
    drafted = tree.Grown.of(batch, None, *mine, key, topk=TOPK)
    drafted.kv_loc_plan = "planned"
    found = made.decide(batch, drafted)
    assert found.kv_loc_plan == "planned"
    for ours, expected in zip(sent, (mine[0], planned, mine[2]), strict=True):
        assert torch.equal(ours, expected)
    assert found.trees == theirs
    assert (found.width, found.more["packed"], found.more["attn_backend"]) == (5, True, backend)
    assert found.more["wanted"].tolist() == [4]


def test_a_pool_whose_slots_cannot_be_moved_is_refused(tree: Any):
    with pytest.raises(tree.ConfigError, match="keeps its keys in a object, whose slots tree mode cannot move"):
        tree.kv_buffers(object())


@pytest.mark.parametrize("nodes", [1, 2, TOPK * DEPTH])
def test_every_step_teaches_what_chains_and_trees_bring(tree: Any, monkeypatch: pytest.MonkeyPatch, nodes: int):
    """But nothing of those that have a threshold of their own, and whatever the tree's size may be."""
    planner = TreePlanner(CURVE, None, topk=TOPK, steps=DEPTH, most=nodes, device=torch.device("cpu"))
    planner.packed = True
    planner.vary(True)
    assert planner.shapes is not None
    scorer = policies.grower("c2t", TOPK, DEPTH, nodes, narrow=1)
    monkeypatch.setattr(tree.ranks, "alone", lambda: True)
    made = drafter_of(tree, scorer, None)
    made._planner = planner
    slots = torch.tensor([4, 1, 6])
    scorer.set_requests(slots, [None, 0.9, None], [None] * 3)
    seen: list[tuple[int, Any, Any]] = []
    monkeypatch.setattr(planner.shapes, "observe", lambda *found: seen.append(found))
    for width in (TOPK, 1):
        planner.begin(3)
        planner.width = width
        policies.grown(scorer, DEPTH, width=width)
        parents, keep, _, key = scorer.end()
        made._planned(parents, keep, key, [], slots)
    (_, best, chains), (_, chain, none) = seen
    assert [width for width, *_ in seen] == [TOPK, 1] and none is None
    assert best.shape == (2, DEPTH, nodes)
    assert chain.shape == chains.shape == (2, DEPTH, min(nodes, DEPTH))
    if nodes == TOPK * DEPTH:
        # the trees hold the chains; what is worth most does not fall with more layers
        assert chains == pytest.approx(chain) and (chain[:, -1] > 0).all()
        assert (best[:, 1:].cumsum(-1) >= best[:, :-1].cumsum(-1) - 1e-6).all()
        assert (best.cumsum(-1)[..., :DEPTH] >= chains.cumsum(-1) - 1e-6).all()
