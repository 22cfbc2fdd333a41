"""The tree as a data structure."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.token_tree import DTYPES, TokenTree, pack
from c2t_plugin.trees.nodes import best


def by_hand(token_ids: list[int], parent_ids: list[int], log_probs: list[float]) -> TokenTree:
    """One tree as a batch of one. Entropies and margin are 0, ranks count siblings in their order."""
    depths: list[int] = []
    joint: list[float] = []
    for parent, own in zip(parent_ids, log_probs, strict=True):
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
        joint.append(own + (joint[parent] if parent >= 0 else 0.0))
    known = {
        **{"token_ids": token_ids, "parent_ids": parent_ids, "depths": depths, "alive": [True] * len(depths)},
        **{"log_probs": log_probs, "joint_log_probs": joint, "scores": [math.exp(each) for each in joint]},
        "rank": [parent_ids[:column].count(parent) for column, parent in enumerate(parent_ids)],
    }
    nothing = [0.0] * len(depths)
    return TokenTree(**{name: torch.tensor([known.get(name, nothing)], dtype=DTYPES[name]) for name in DTYPES})


def tree_of(*parents: int) -> TokenTree:
    return by_hand(list(range(10, 10 + len(parents))), list(parents), [0.0] * len(parents)).validate()


@st.composite
def trees(draw, largest: int = 12) -> TokenTree:
    count = draw(st.integers(0, largest))
    return tree_of(*(draw(st.integers(-1, column - 1)) for column in range(count)))


def masks(tree: TokenTree) -> st.SearchStrategy[torch.Tensor]:
    bits = st.lists(st.booleans(), min_size=tree.nodes, max_size=tree.nodes)
    return bits.map(lambda found: torch.tensor([found], dtype=torch.bool).view(1, -1))


def line(tree: TokenTree, node: int) -> list[int]:
    """The node and its ancestors."""
    found = []
    while node >= 0:
        found.append(node)
        node = int(tree.parent_ids[0, node])
    return found


def test_a_tree_written_by_hand() -> None:
    tree = by_hand([7, 8, 9, 7], [-1, -1, 0, 0], [-1.0, -2.0, -0.5, -3.0]).validate()
    assert tree.depths.tolist() == [[1, 1, 2, 2]]
    assert tree.rank.tolist() == [[0, 1, 0, 1]]
    assert tree.joint_log_probs.tolist() == [[-1.0, -2.0, -1.5, -4.0]]
    assert tree.sizes().tolist() == [4]
    assert tree.stats().depth.tolist() == [[1.0, 1.0, 2.0, 2.0]]


@given(trees())
def test_ancestors_are_the_walk_to_the_root(tree) -> None:
    expected = [[column in line(tree, node) for column in range(tree.nodes)] for node in range(tree.nodes)]
    assert tree.ancestors()[0].tolist() == expected


def test_dead_nodes_are_nobodys_ancestors() -> None:
    tree = tree_of(-1, 0, 1, -1)
    kept = tree.keep(torch.tensor([[True, True, False, False]]))
    assert kept.ancestors()[0].nonzero().tolist() == [[0, 0], [1, 0], [1, 1]]


@given(st.data())
def test_closing_keeps_the_nodes_whose_whole_line_is_in_the_mask(data) -> None:
    tree = data.draw(trees())
    mask = data.draw(masks(tree))
    expected = [all(mask[0, above] for above in line(tree, node)) for node in range(tree.nodes)]
    closed = tree.closed(mask)
    assert closed[0].tolist() == expected
    tree.keep(closed).validate()


@given(data=st.data())
def test_compacting_keeps_every_live_nodes_path(paths, data) -> None:
    parts = [tree.keep(tree.closed(data.draw(masks(tree)))) for tree in data.draw(st.lists(trees(), min_size=1))]
    batch = TokenTree.stack(parts)
    small = batch.compact().validate()
    assert small.nodes == max(int(tree.alive.sum()) for tree in parts)
    assert small.sizes().tolist() == batch.sizes().tolist() == [int(tree.alive.sum()) for tree in parts]
    for row, tree in enumerate(parts):
        assert paths(small, row) == paths(batch, row) == paths(tree)
        assert small.alive[row].int().diff().le(0).all(), "live nodes come first"


def test_an_orphan_is_refused() -> None:
    with pytest.raises(C2TError, match="node 2 of tree 0 would be kept without its parent"):
        tree_of(-1, 0, 1).keep(torch.tensor([[True, False, True]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent_ids": torch.tensor([[-1, 1, 0]])}, "before its children"),
        ({"parent_ids": torch.tensor([[-2, 0, 0]])}, "before its children"),
        ({"depths": torch.tensor([[1, 2, 3]])}, "one deeper"),
        ({"alive": torch.tensor([[False, True, True]])}, "dead parent"),
        ({"entropy": torch.zeros(1, 3, dtype=torch.float64)}, "entropy is .* torch.float64"),
        ({"rank": torch.zeros(1, 2, dtype=torch.int64)}, r"rank is \(1, 2\)"),
    ],
)
def test_a_broken_tree_is_refused(change, message) -> None:
    with pytest.raises(C2TError, match=message):
        replace(tree_of(-1, 0, 0), **change).validate()


def test_an_empty_tree_has_every_operation() -> None:
    tree = TokenTree.empty(3).validate()
    nothing = torch.zeros(3, 0, dtype=torch.bool)
    assert tree.ancestors().shape == (3, 0, 0)
    assert tree.keep(tree.closed(nothing)).compact().sizes().tolist() == [0, 0, 0]
    assert TokenTree.stack([tree, tree_of(-1, 0)]).sizes().tolist() == [0, 0, 0, 2]


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5))
def test_packing_lists_the_columns(rows) -> None:
    found = pack(torch.tensor(rows))
    expected = [[column for column, bit in enumerate(row) if bit] for row in rows]
    assert found.shape == (len(rows), max(map(len, expected)))
    assert [[column for column in row if column >= 0] for row in found.tolist()] == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=8), st.integers(0, 9))
def test_the_best_are_those_of_a_stable_sort(entries, count) -> None:
    scores = torch.tensor([[float(score) for score, _ in entries]])
    mask = torch.tensor([[bit for _, bit in entries]])
    order = sorted((i for i, (_, bit) in enumerate(entries) if bit), key=lambda i: -entries[i][0])[:count]
    assert best(scores, mask, count)[0].nonzero().flatten().tolist() == sorted(order)
