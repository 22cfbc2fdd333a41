"""Block counts of random and recorded trees beside DySpec's."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from benchmarks.papers import blocks
from benchmarks.papers.ordering import attention_blocks, depth_first_order
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.plans import TreeShape
from c2t_plugin.lab.trees import grow


@pytest.fixture(scope="module")
def uniform_rows() -> list[blocks.Row]:
    return blocks.table5_rows(40, ["uniform attachment"])


@pytest.fixture(scope="module")
def forest(toy_draft, toy_logits):
    states, shape = 6, TreeShape(3, 5, 6)
    return grow(toy_draft(states, toy_logits(6, 1)), torch.zeros(states, shape.layers, dtype=torch.int64), shape)


@pytest.mark.parametrize("name", blocks.GENERATORS)
@pytest.mark.parametrize("nodes", [1, 2, 33, 200])
def test_generators_make_trees_of_the_size_asked_for(name, nodes) -> None:
    parents = torch.tensor(blocks.GENERATORS[name](nodes, np.random.default_rng(nodes)))
    assert len(parents) == nodes
    assert attention_blocks(parents) >= math.ceil(nodes / 32)  # refuses what is no tree
    assert (parents < 0).sum() == 1 or "not counted" in name


def test_uniform_attachment_is_uniform() -> None:
    drawn = Counter(tuple(blocks.uniform_attachment(4, np.random.default_rng(seed))) for seed in range(3000))
    assert len(drawn) == 6
    # 500 each; five standard deviations
    assert max(abs(count - 500) for count in drawn.values()) < 5 * math.sqrt(3000 * 5 / 36)


def test_conditioned_galton_watson_has_the_labelled_trees_shapes() -> None:
    """Of the 16 trees on four labels, rooted at any of them, 24 of 64 are paths from the root, 4 are stars."""
    drawn = Counter(tuple(blocks.conditioned_galton_watson(4, np.random.default_rng(seed))) for seed in range(3000))
    expected = {(-1, 0, 1, 2): 24, (-1, 0, 0, 0): 4, (-1, 0, 1, 1): 12, (-1, 0, 0, 1): 12, (-1, 0, 0, 2): 12}
    assert set(drawn) == set(expected)
    for shape, share in expected.items():
        chance = share / 64
        assert abs(drawn[shape] - 3000 * chance) < 5 * math.sqrt(3000 * chance * (1 - chance))


def agrees(row: blocks.Row) -> bool:
    """Within four standard errors of a mean over ten trees, which the paper's decimals look like."""
    error = math.hypot(row["std"] / math.sqrt(10), row["std"] / math.sqrt(row["trees"]))
    return abs(row["paper"] - row["ours"]) <= 4 * error


@pytest.mark.slow
def test_uniform_attachment_gives_table_5(uniform_rows) -> None:
    rows = [row for row in uniform_rows if row["order"] != "heavy-path"]
    assert len(rows) == 8
    assert [row for row in rows if not agrees(row)] == []


def test_heavy_paths_would_have_given_less_than_table_5(uniform_rows) -> None:
    large = [row for row in uniform_rows if row["order"] == "heavy-path" and row["nodes"] >= 512]
    assert len(large) == 3
    for row in large:
        assert row["paper"] > row["ours"] + 4 * row["std"] / math.sqrt(10), row


@pytest.mark.slow
def test_uniform_attachment_is_the_nearest_generator() -> None:
    """And the only one that the figures do not rule out, whichever of the two orders was measured."""
    rows = blocks.table5_rows(10)
    for reordered in ("depth-first", "heavy-path"):
        left = {row["generator"] for row in rows}
        left -= {row["generator"] for row in rows if row["order"] in ("insertion", reordered) and not agrees(row)}
        assert left == ({"uniform attachment"} if reordered == "depth-first" else set())
    distances = blocks.distances(rows)
    assert len(distances) == len(blocks.GENERATORS)
    assert next(iter(distances)) == "uniform attachment"
    assert distances["uniform attachment"] < 0.03


def test_rows_say_what_they_are() -> None:
    rows = blocks.table5_rows(2, ["layers of 32"])
    assert [(row["nodes"], row["order"]) for row in rows[:4]] == [
        (256, "insertion"),
        (256, "depth-first"),
        (256, "heavy-path"),
        (512, "insertion"),
    ]
    assert [row["paper"] for row in rows[:4]] == [36.0, 22.5, 22.5, 135.5]
    assert all(row["generator"] == "layers of 32" and row["trees"] == 2 for row in rows)
    assert all(row["low"] <= row["ours"] <= row["high"] for row in rows)
    assert blocks.table5_rows(2, ["layers of 32"]) == rows


def test_an_interval_by_hand() -> None:
    # mean 3, standard deviation 2, standard error 1
    found = blocks._summary([1.0, 3.0, 5.0, 3.0 - math.sqrt(2), 3.0 + math.sqrt(2)])
    std = math.sqrt((4 + 0 + 4 + 2 + 2) / 4)
    half = 1.96 * std / math.sqrt(5)
    assert found == {
        "ours": 3.0,
        "low": pytest.approx(3 - half, abs=5e-3),
        "high": pytest.approx(3 + half, abs=5e-3),
        "std": pytest.approx(std, abs=5e-3),
    }


def test_one_tree_has_no_interval() -> None:
    with pytest.raises(C2TError, match="at least 2 trees"):
        blocks.table5_rows(1, ["layers of 32"])


def test_figure_9_needs_a_prefix() -> None:
    """The paper's 366.12 blocks are more than a tree of 768 nodes alone can have, in an order with parents first."""
    full = attention_blocks(torch.arange(-1, 767))
    assert full == 300 < blocks.FIGURE_9[768][0]


def test_recorded_trees_are_the_most_probable_nodes(forest) -> None:
    """Against a heap that adds the most probable node whose parent is in the tree (DySpec D.1), one at a time."""
    columns = forest.joint_log_prob.shape[1]
    for nodes in (1, 7, columns):
        for row, tree in enumerate(blocks.recorded_trees(forest, nodes, greedy=True)):
            above = forest.parent_ids[row].repeat_interleave(forest.k).tolist()
            joint = forest.joint_log_prob[row].tolist()
            taken: list[int] = []
            for _ in range(nodes):
                free = [c for c in range(columns) if c not in taken and (above[c] < 0 or above[c] in taken)]
                taken.append(max(free, key=lambda c: (joint[c], -c)))
            assert tree.tolist() == [taken.index(above[c]) if above[c] >= 0 else -1 for c in taken]


def test_layer_order_has_the_same_nodes(forest) -> None:
    greedy, layers = (blocks.recorded_trees(forest, 20, greedy) for greedy in (True, False))
    for one, other in zip(greedy, layers, strict=True):
        assert attention_blocks(one, depth_first_order(one), 4) == attention_blocks(other, depth_first_order(other), 4)
        depths = []
        for parent in other.tolist():
            depths.append(1 if parent < 0 else depths[parent] + 1)
        assert depths == sorted(depths)


def test_a_certain_child_stays_behind_its_parent(toy_draft) -> None:
    # every joint probability is 1
    sure = toy_draft(2, lambda state, path: [0.0, -math.inf])
    forest = grow(sure, torch.zeros(2, 40, dtype=torch.int64), TreeShape(1, 40, 2))
    for tree in blocks.recorded_trees(forest, 40, greedy=True):
        assert tree.tolist() == list(range(-1, 39))


@pytest.mark.parametrize("nodes", [0, 1_000])
def test_more_nodes_than_recorded_are_refused(forest, nodes) -> None:
    with pytest.raises(C2TError, match="are asked for"):
        blocks.recorded_trees(forest, nodes, greedy=True)


def test_figure_9_rows_average_over_prefixes() -> None:
    chains = [torch.arange(-1, 3), torch.arange(-1, 7)]
    rows = blocks.figure9_rows(chains, "by hand", 768, prefixes=(2, 3), block=2)
    # 4 nodes: 2 rows of 1 + 1 and 1 + 2 blocks behind 2 tokens; behind 3 tokens 2 + 1 and 2 + 2 blocks
    # 8 nodes: 2 + 3 + 4 + 5, and 3 + 4 + 5 + 6
    means = [(5 + 7) / 2, (14 + 18) / 2]
    assert [row["ours"] for row in rows] == [sum(means) / 2] * 3
    assert [row["paper"] for row in rows] == [366.12, 218.31, 218.31]
    assert rows[0]["nodes"] == 6.0 and rows[0]["trees"] == 2 and rows[0]["drafted"] == "by hand"


def test_recorded_rows_take_no_more_nodes_than_there_are(forest) -> None:
    rows = blocks.recorded_rows(forest)
    assert len(rows) == 12
    assert {row["nodes"] for row in rows} == {float(forest.joint_log_prob.shape[1])}
    assert {row["paper"] for row in rows} == {366.12, 218.31, 580.07, 295.59}
