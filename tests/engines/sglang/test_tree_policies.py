"""Growth in fixed slots against the core's policies and against SGLang's own selection, on a made-up draft."""

from __future__ import annotations

import pathlib
import tempfile
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.classifier import NodeClassifier, load_classifier  # noqa: E402
from c2t_plugin.config import POLICIES  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from c2t_plugin.lab.grow import LogitDistributions, grow_tree  # noqa: E402
from c2t_plugin.lab.policies.base import JointProb  # noqa: E402
from c2t_plugin.lab.policies.c2t import C2TTree, ThresholdTree  # noqa: E402
from c2t_plugin.lab.policies.dyspec import DySpecGreedy  # noqa: E402
from c2t_plugin.lab.policies.eagle2 import Eagle2  # noqa: E402
from c2t_plugin.lab.policies.entropy import DynamicWidth  # noqa: E402
from c2t_plugin.lab.policies.static import StaticTree  # noqa: E402
from c2t_plugin.lab.token_tree import TokenTree  # noqa: E402
from c2t_plugin.trees.branches import inherit_branches  # noqa: E402
from c2t_plugin.trees.by_name import slot_policy  # noqa: E402
from c2t_plugin.trees.grower import TreeGrower  # noqa: E402
from c2t_plugin.trees.published import EAGLE1_PATHS, EAGLE1_WIDTH  # noqa: E402
from tests.support.sglang.verify_counts import save_hand_made_classifier  # noqa: E402

VOCAB = 40
STATES = 3
TOP_M = 1000
Path = tuple[int, ...]


@cache
def classifier() -> NodeClassifier:
    with tempfile.TemporaryDirectory() as folder:
        return load_classifier(save_hand_made_classifier(pathlib.Path(folder) / "hand.safetensors"))


def logits_after(state: int, path: Path) -> Tensor:
    """What the draft says after a path below the root of a state: some words likely, most not."""
    generator = torch.Generator().manual_seed(hash((state, *path)) % 2**31)
    return 3 * torch.randn(VOCAB, generator=generator)


@dataclass
class MadeUpDrafter:
    """The same draft for the core's growth loop."""

    paths: list[list[Path]] = field(default_factory=lambda: [[] for _ in range(STATES)])

    def root(self) -> LogitDistributions:
        return LogitDistributions(torch.stack([logits_after(state, ()) for state in range(STATES)])[:, None])

    def extend(self, token_ids: Tensor, parents: Tensor) -> LogitDistributions:
        rows = []
        for state in range(STATES):
            known = self.paths[state]
            above = [known[parent] if parent >= 0 else () for parent in parents[state].tolist()]
            new = [(*path, token) for path, token in zip(above, token_ids[state].tolist(), strict=True)]
            known += new
            rows.append(torch.stack([logits_after(state, path) for path in new]))
        return LogitDistributions(torch.stack(rows))


def grower(
    name: str, topk: int, depth: int, max_nodes: int, beta: float = 0.0, narrow: int | None = None, **options: Any
) -> TreeGrower:
    """narrow: width of a second rule."""
    policy = slot_policy(name, classifier(), topk, "cpu")
    options["narrow"] = None if narrow is None else slot_policy(name, classifier(), narrow, "cpu")
    limits = {"slots": 8, "max_depth": depth, "max_nodes": max_nodes, "beta": beta, "device": "cpu"}
    return TreeGrower(policy, top_m=TOP_M, **{**limits, **options})


def grown(
    made: TreeGrower, depth: int, slots: tuple[int, ...] = (4, 1, 6), width: int | None = None
) -> list[set[Path]]:
    """Paths of the trees that a draft of `depth` layers grows, state by state."""
    where = torch.tensor(slots)
    made.write_seed(where, torch.stack([logits_after(state, ()) for state in range(STATES)]))
    layer = made.begin(where, width)
    frontier: list[list[Path]] = [[()] for _ in slots]
    for _ in range(depth - 1):
        frontier = [
            [(*above[parent], token) for parent, token in zip(parents, tokens, strict=True)]
            for above, parents, tokens in zip(
                frontier, layer.parents.clamp_min(0).tolist(), layer.token_ids.tolist(), strict=True
            )
        ]
        rows = [logits_after(state, path) for state, paths in enumerate(frontier) for path in paths]
        layer = made.step(torch.stack(rows))
    parent_ids, keep, token_ids, _ = made.end()
    return [paths_of(*row) for row in zip(parent_ids.tolist(), keep.tolist(), token_ids.tolist(), strict=True)]


def paths_of(parent_ids: list[int], keep: list[bool], token_ids: list[int]) -> set[Path]:
    paths: dict[int, Path] = {-1: ()}
    for column, (parent, kept, token) in enumerate(zip(parent_ids, keep, token_ids, strict=True)):
        assert parent < column, "a parent after its child"
        if kept:
            paths[column] = (*paths[parent], token)
    return set(paths.values()) - {()}


def trees_of(policy: Any) -> list[set[Path]]:
    """The same by the core's growth loop."""
    tree: TokenTree = grow_tree(MadeUpDrafter(), policy).tree
    fields = (tree.parent_ids.tolist(), tree.alive.tolist(), tree.token_ids.tolist())
    return [paths_of(*row) for row in zip(*fields, strict=True)]


def core_policy(name: str, topk: int, depth: int, max_nodes: int, beta: float) -> Any:
    shape = {"first_k": topk, "second_k": topk, "d_max": depth}
    policies = {
        "c2t": lambda: C2TTree(classifier=classifier(), beta=beta, **shape),
        "prob": lambda: ThresholdTree(score=JointProb(), beta=beta, **shape),
        "eagle2": lambda: Eagle2(k=topk, d_max=depth, max_nodes=max_nodes),
        "dyspec": lambda: DySpecGreedy(temperature=1.0, d_max=depth, max_children=topk, max_nodes=max_nodes),
        "entropy": lambda: DynamicWidth(d_max=depth),
        "static": lambda: StaticTree(paths=EAGLE1_PATHS),
    }
    return policies[name]()


# beta: what leaves trees of several sizes.
# Of the rivals none but eagle2 and c2t keeps few enough nodes per layer to be the same with a narrow frontier.
@pytest.mark.parametrize(
    ("name", "topk", "depth", "max_nodes", "beta"),
    [
        ("c2t", 4, 4, 16, 0.1),
        ("c2t", 3, 2, 6, 0.0),
        ("c2t", 1, 5, 5, 0.0),
        ("prob", 4, 5, 20, 0.05),
        ("prob", 8, 3, 24, 0.02),
        ("eagle2", 4, 4, 12, 0.0),
        ("eagle2", 8, 3, 60, 0.0),
        ("dyspec", 12, 4, 10, 0.0),
        ("entropy", 16, 2, 400, 0.0),
        ("static", 4, 5, 25, 0.0),
        ("static", 6, 7, 25, 0.0),
    ],
)
def test_the_core_grows_the_same_trees(name: str, topk: int, depth: int, max_nodes: int, beta: float):
    found = grown(grower(name, topk, depth, max_nodes, beta), depth)
    assert found == trees_of(core_policy(name, topk, depth, max_nodes, beta))
    assert any(len(tree) > 1 for tree in found)
    if beta:
        assert len({len(tree) for tree in found}) > 1, "beta cuts all of these trees alike: choose another"


def test_every_policy_is_tested():
    marks = test_the_core_grows_the_same_trees.pytestmark  # type: ignore[attr-defined]
    (cases,) = (mark.args[1] for mark in marks if mark.name == "parametrize")
    assert {case[0] for case in cases} == set(POLICIES)


def test_eagle2_has_the_nodes_of_sglangs_own_selection(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """Of equal joint probabilities the lower column goes first here; SGLang leaves their order to torch.topk."""
    monkeypatch.syspath_prepend(str(SITE))
    from sglang.srt.speculative.eagle_utils import organize_draft_results
    from sglang.srt.speculative.spec_utils import _select_top_k_tokens_first, _select_top_k_tokens_later

    topk, depth, width = 4, 5, 20
    selected: Any = [], [], []
    frontier: list[list[Path]] = [[()] for _ in range(STATES)]
    scores = None
    for step in range(depth):
        rows = torch.stack([logits_after(s, path) for s, paths in enumerate(frontier) for path in paths])
        topk_p, topk_index = rows.softmax(-1).topk(topk)
        # the plain function: what torch.compile makes of it is not the matter here
        later = getattr(_select_top_k_tokens_later, "_torchdynamo_orig_callable", _select_top_k_tokens_later)
        if step == 0:
            ids, _, scores, info = _select_top_k_tokens_first(topk_p, topk_index, None, topk)
            slots = [[0] * topk] * STATES
        else:
            ids, _, scores, info = later(step, topk_p, topk_index, None, scores, topk)
            slots = ((info[2] - topk - topk**2 * (step - 1)) // topk).tolist()
        for parts, part in zip(selected, info, strict=True):
            parts.append(part)
        tokens = ids.view(STATES, topk).tolist()
        frontier = [
            [(*above[slot], token) for slot, token in zip(*row, strict=True)]
            for above, *row in zip(frontier, slots, tokens, strict=True)
        ]
    parents, chosen, drafts = organize_draft_results(*selected, width)
    stock = [stock_paths(*row, topk) for row in zip(parents.tolist(), chosen.tolist(), drafts.tolist(), strict=True)]
    assert grown(grower("eagle2", topk, depth, width - 1), depth) == stock


def stock_paths(parents: list[int], chosen: list[int], tokens: list[int], topk: int) -> set[Path]:
    """Candidate c grew from candidate parents[c // topk], or from the root where c // topk is 0."""
    paths: dict[int, Path] = {}
    for candidate, token in zip(chosen, tokens, strict=True):
        block = candidate // topk
        paths[candidate] = (*(paths[parents[block]] if block else ()), token)
    return set(paths.values())


# --- limits


def test_too_many_nodes_lose_the_least_sure_ones():
    free, limited = (grown(grower("prob", 4, 4, most, 0.01), 4) for most in (16, 5))
    for large, small in zip(free, limited, strict=True):
        assert small <= large
        assert len(small) == min(5, len(large))
        assert all(path[:-1] in small or len(path) == 1 for path in small)
    assert any(len(large) > 5 for large in free)


def test_a_request_has_its_own_beta_and_depth():
    made = grower("prob", 4, 4, 16, 0.01)
    made.set_requests(torch.tensor([1, 6]), [0.2, None], [None, 1])
    server, strict, shallow = grown(made, 4)
    whole = grown(grower("prob", 4, 4, 16, 0.01), 4)
    assert server == whole[0]
    assert strict == grown(grower("prob", 4, 4, 16, 0.2), 4)[1]
    assert strict < whole[1]
    assert shallow == {path for path in whole[2] if len(path) == 1}


def test_nothing_is_drafted_after_a_slot_without_a_seed():
    made = grower("c2t", 4, 2, 8)
    made.begin(torch.tensor([3]))
    assert not made.alive
    _, keep, _, _ = made.end()
    assert not keep.any()


def test_a_rule_without_a_threshold_takes_no_beta():
    made = grower("eagle2", 4, 2, 8)
    with pytest.raises(ConfigError, match="not cut by a threshold"):
        made.set_beta(0.5)


def test_words_are_named_in_the_targets_vocabulary():
    names = torch.arange(VOCAB) + 1000
    found = grown(grower("c2t", 3, 1, 3, vocabulary=names), 1)
    plain = grown(grower("c2t", 3, 1, 3), 1)
    assert found == [{(token + 1000,) for (token,) in tree} for tree in plain]


def test_statistics_that_are_not_finite_keep_the_node_and_are_counted():
    made = grower("c2t", 2, 1, 2, 1.0)
    logits = logits_after(0, ())[None].clone()
    logits[0, 3] = torch.nan
    made.write_seed(torch.tensor([2]), logits)
    made.begin(torch.tensor([2]))
    _, keep, _, _ = made.end()
    assert keep.all()
    assert int(made.non_finite) == 2


# --- keys of branches


def test_a_branch_gets_the_keys_of_the_nodes_above_it():
    slots = torch.tensor([[[10, 11, 12], [20, 21, 22], [30, 31, 32]]])
    pool = torch.arange(40.0)
    other = pool.clone()[:, None] * 2
    # branches 0 and 1 swap, branch 2 grew from 0, and its third step was not written yet
    inherit_branches([pool, other], slots, torch.tensor([[1, 0, 0]]), written=2)
    assert pool[slots[0]].tolist() == [[20, 21, 12], [10, 11, 22], [10, 11, 32]]
    assert torch.equal(other[:, 0], pool * 2)


def test_a_dead_branch_does_no_harm():
    slots = torch.tensor([[[1, 2], [3, 4]]])
    pool = torch.arange(6.0)
    inherit_branches([pool], slots, torch.tensor([[0, -1]]), written=1)
    assert pool.tolist() == [0, 1, 2, 1, 4, 5]


def test_the_static_tree_fits_its_slots():
    growing = {path[:-1] for path in EAGLE1_PATHS}
    per_layer = [sum(len(path) == depth for path in growing) for depth in range(1, 5)]
    assert max(per_layer) <= EAGLE1_WIDTH


@pytest.mark.parametrize("name", ["c2t", "prob"])
@pytest.mark.parametrize("narrow", [1, 2])
def test_a_narrow_draft_is_that_of_a_narrow_server(name: str, narrow: int):
    """One after the other in one grower, the wide one whole in between."""
    made = grower(name, 4, 3, 12, 0.02, narrow)
    for width in (narrow, 4, narrow):
        alone = grower(name, width, 3, 12, 0.02)
        assert grown(made, 3, width=width) == grown(alone, 3)
        assert all(torch.equal(*both) for both in zip(made.end(), alone.end(), strict=True))
        layers = made.layers("cpu").tolist()
        assert len(layers) == made.end()[0].shape[1]
        assert [layers.count(layer) for layer in (1, 2, 3)] == [width, width**2, width**2]
    whole = grower(name, 4, 3, 12, 0.02, narrow)
    assert grown(whole, 3) == grown(grower(name, 4, 3, 12, 0.02), 3), "the wide one if nothing is said"
