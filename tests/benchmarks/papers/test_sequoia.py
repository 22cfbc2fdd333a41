"""Sequoia's dynamic programme against every tree of a small size."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.sequoia import Sequoia, plan_paths
from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.grow import grow_tree


@cache
def every_tree(branches: int, max_nodes: int, d_max: int) -> set[frozenset[tuple[int, ...]]]:
    """All sets of at most max_nodes rank paths with their ancestors and elder siblings."""
    layer, found = {frozenset({()})}, set()
    for _ in range(max_nodes):
        layer = {
            tree | {(*path, rank)}
            for tree in layer
            for path in tree
            if len(path) < d_max
            for rank in range(branches)
            if (*path, rank) not in tree and (not rank or (*path, rank - 1) in tree)
        }
        found |= layer
    return {tree - {()} for tree in found}


def expected_accepted(paths, acceptance) -> float:
    """Accepted draft tokens per verification, bonus excluded, if a child of rank r is accepted with acceptance[r]
    whenever its parent is, at every place of the tree (Sequoia's positional acceptance assumption)."""
    return sum(math.prod(acceptance[rank] for rank in path) for path in paths)


@settings(max_examples=40)
@given(
    st.lists(st.floats(0.01, 1), min_size=2, max_size=3),
    st.floats(0.3, 1),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_no_tree_is_better(weights, total, max_nodes, d_max) -> None:
    rates = [total * weight / sum(weights) for weight in weights]
    paths = plan_paths(rates, max_nodes, d_max)
    assert len(paths) <= max_nodes and max(map(len, paths)) <= d_max
    best = max(expected_accepted(tree, rates) for tree in every_tree(len(rates), max_nodes, d_max))
    assert expected_accepted(paths, rates) == pytest.approx(best)


def test_by_hand() -> None:
    # .6, .3: first children first (.6), then .36 deeper against .3 beside
    assert plan_paths([0.6, 0.3], 3, 4) == ((0,), (1,), (0, 0))
    assert plan_paths([0.6, 0.3], 3, 1) == ((0,), (1,))
    assert plan_paths([0.9, 0.05], 4, 10) == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    assert plan_paths([1.0], 3, 10) == ((0,), (0, 0), (0, 0, 0))
    assert expected_accepted(((0,), (1,), (0, 0)), [0.6, 0.3]) == pytest.approx(0.6 + 0.3 + 0.36)


def test_a_rank_that_is_never_accepted_gets_no_node() -> None:
    assert plan_paths([0.5, 0.0, 0.0], 6, 2) == ((0,), (0, 0))


@pytest.mark.slow
def test_the_papers_sizes_are_used_to_the_full() -> None:
    rates = [0.55, 0.15, 0.07, 0.04, 0.03, 0.02, 0.02, 0.01]
    small, large = (plan_paths(rates, size, 20) for size in (64, 768))
    assert (len(small), len(large)) == (64, 768)
    assert expected_accepted(large, rates) > expected_accepted(small, rates) > 1


def test_the_plan_is_a_tree_that_grows(path_draft, at_random) -> None:
    policy = Sequoia.plan([0.5, 0.2, 0.1], max_nodes=12, d_max=4)
    assert grow_tree(path_draft(2, at_random(6, 0)), policy).tree.sizes().tolist() == [12, 12]


@pytest.mark.parametrize(
    ("rates", "max_nodes", "d_max", "message"),
    [
        ([], 3, 3, "probabilities of sum at most 1"),
        ([0.7, 0.5], 3, 3, "probabilities of sum at most 1"),
        ([-0.1, 0.5], 3, 3, "probabilities of sum at most 1"),
        ([float("nan")], 3, 3, "probabilities of sum at most 1"),
        ([0.5], 0, 3, "at least 1, got 0 and 3"),
        ([0.5], 3, 0, "at least 1, got 3 and 0"),
    ],
)
def test_bad_input_is_refused(rates, max_nodes, d_max, message) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_paths(rates, max_nodes, d_max)


def test_a_draft_that_is_never_right_has_no_plan() -> None:
    with pytest.raises(ConfigError, match="at least one is needed"):
        Sequoia.plan([0.0, 0.0], 4, 4)
