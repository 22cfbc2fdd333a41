"""Width and depth of the next step's trees, against every choice that there is."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from c2t_plugin.planner import PROBE_EVERY, CostCurve, draft_passes
from c2t_plugin.planner.planner import FORGET, FORGET_ONE, PROBES_COST, WHOLE_FIRST
from c2t_plugin.planner.shapes import Shape, Shapes
from c2t_plugin.trees.worth import best_by_layers, chain_by_layers

D_MAX, WIDTH = 3, 4
CURVE = CostCurve(
    verify=((1, 1.0), (8, 1.2), (64, 12.0)), draft=((1, 0.05), (8, 0.1), (64, 2.0)), fixed=0.1, draft_extend=0.05
)
# a tree's second and third nodes are worth something
CHAIN = np.array([[0.7, 0.0, 0.0], [0.7, 0.4, 0.0], [0.7, 0.4, 0.2]])
TREE = np.array([[0.7, 0.2, 0.1, 0.0, 0.0], [0.7, 0.45, 0.2, 0.15, 0.1], [0.7, 0.45, 0.25, 0.2, 0.15]])


def knowing(chain: np.ndarray = CHAIN, tree: np.ndarray = TREE) -> Shapes:
    made = Shapes(WIDTH, D_MAX)
    made.observe(WIDTH, np.stack([tree] * WHOLE_FIRST), np.stack([chain] * WHOLE_FIRST))
    return made


def outcome(means: np.ndarray, curve: CostCurve, requests: int, width: int, depth: int) -> tuple[float, float]:
    """Tokens per second and seconds, of the best of every number of nodes."""
    drafting = draft_passes(depth) * curve.draft_s(requests * width)
    found = []
    for nodes in range(means.shape[1] + 1):
        seconds = float(curve.verify_s(torch.tensor(requests * (1 + nodes)))) + drafting + curve.beside
        found.append((requests * (1 + means[depth - 1, :nodes].sum()) / seconds, seconds))
    return max(found)


def test_the_first_drafts_are_whole_trees():
    made = Shapes(WIDTH, D_MAX)
    for _ in range(WHOLE_FIRST):
        assert made.choose(CURVE, 8) == Shape(WIDTH, D_MAX)
        made.observe(WIDTH, TREE[None], CHAIN[None])
    assert made.choose(CURVE, 8).width == 1


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 8, 16, 40])
def test_no_other_shape_gives_more_per_second(requests: int):
    rates = {
        Shape(width, depth): outcome(means, CURVE, requests, width, depth)[0]
        for (width, means), depth in itertools.product(((1, CHAIN), (WIDTH, TREE)), range(1, D_MAX + 1))
    }
    found = knowing().choose(CURVE, requests)
    assert rates[found] == pytest.approx(max(rates.values()), rel=1e-12)


def test_trees_are_for_few_requests_and_chains_for_many():
    made = knowing()
    assert [made.choose(CURVE, requests).width for requests in (1, 2, 8)] == [WIDTH, WIDTH, 1]
    # where nothing is worth a row, the least is drafted, which has no pass
    assert made.choose(CURVE, 64) == Shape(1, 1)


def test_means_are_of_all_drafts_first_and_of_the_newest_later():
    made = Shapes(WIDTH, D_MAX)
    for share in (0.5, 1.0, 0.8):
        made.observe(WIDTH, TREE[None] * share, CHAIN[None] * share)
    assert made._means[WIDTH] == pytest.approx(TREE * 2.3 / 3)
    assert made._means[1] == pytest.approx(CHAIN * 2.3 / 3)
    for _ in range(40):
        made.observe(WIDTH, np.stack([TREE] * 8), np.stack([CHAIN] * 8))
    before = made._means[WIDTH].copy()
    made.observe(WIDTH, TREE[None] * 0.5, CHAIN[None])
    assert made._means[WIDTH] == pytest.approx(before + FORGET_ONE * (TREE * 0.5 - before))
    before = made._means[WIDTH].copy()
    made.observe(WIDTH, np.stack([TREE] * 8), np.stack([CHAIN] * 8))
    assert made._means[WIDTH] == pytest.approx(before + FORGET * (TREE - before))


def test_what_was_not_drafted_changes_as_what_was():
    """Deeper layers as the deepest, and trees as chains; but not chains as trees, which say what chains are worth."""
    made, share = knowing(), WHOLE_FIRST + 0.5
    made.observe(1, CHAIN[None, :1] * 0.5)
    assert made._means[1] == pytest.approx(CHAIN * share / (WHOLE_FIRST + 1))
    assert made._means[WIDTH] == pytest.approx(TREE * share / (WHOLE_FIRST + 1))
    made = knowing()
    made.observe(WIDTH, TREE[None, :2] * 0.5, CHAIN[None, :2])
    assert made._means[WIDTH] == pytest.approx(TREE * share / (WHOLE_FIRST + 1))
    assert made._means[1] == pytest.approx(CHAIN)


def test_no_node_is_more_than_certain():
    made = knowing(CHAIN / 7)
    for _ in range(99):
        made.observe(1, np.array([[[1.0, 0.0, 0.0]]]))
    assert made._means[1].max() <= 1.0 and made._means[WIDTH].max() == 1.0


def test_nobody_teaches_nothing():
    made = knowing()
    made.observe(1, np.zeros((0, D_MAX, 3)))
    assert made._means[1] == pytest.approx(CHAIN)


def test_probes_are_whole_trees_apart_from_each_other_and_cost_their_share():
    steps, requests = 4000, 8
    made = knowing()
    chosen = []
    for _ in range(steps):
        width, depth = made.choose(CURVE, requests)
        chosen.append(Shape(width, depth))
        chains = np.stack([CHAIN[:depth]] * requests)
        if width == 1:
            made.observe(1, chains)
        else:
            made.observe(WIDTH, np.stack([TREE[:depth]] * requests), chains)
    (usual, _), (probe, probes) = Counter(chosen).most_common()
    assert usual.width == 1 and probe == Shape(WIDTH, D_MAX)
    at = [step for step, shape in enumerate(chosen) if shape == probe]
    assert min(np.diff(at)) >= PROBE_EVERY
    lost = probes * seconds_lost(probe, usual, requests)
    assert 0.9 * PROBES_COST * steps < lost <= PROBES_COST * steps


def seconds_lost(probe: Shape, usual: Shape, requests: int) -> float:
    """What the usual shape had brought in a probe's time, less what that brings, in steps of the usual shape."""
    best, took = outcome(CHAIN, CURVE, requests, *usual)
    found, seconds = outcome(TREE, CURVE, requests, *probe)
    return seconds / took * (1 - found / best)


def test_the_best_nodes_of_the_first_layers():
    keep = torch.tensor([[True, True, True, False, True], [True, False, False, False, False]])
    key = torch.tensor([[0.5, 0.9, 0.4, 0.8, 0.6], [float("inf"), 0.3, 0.3, 0.3, 0.3]])
    layers = torch.tensor([1, 1, 2, 2, 3])
    found = best_by_layers(keep, key, layers, 3, 4)
    assert found.tolist()[0] == pytest.approx(
        [pytest.approx(row) for row in ([0.9, 0.5, 0, 0], [0.9, 0.5, 0.4, 0], [0.9, 0.6, 0.5, 0.4])]
    )
    assert found[1].tolist() == [[1.0, 0, 0, 0]] * 3
    assert best_by_layers(keep, key, layers, 1, 9).shape == (2, 1, 5)


def test_the_chain_in_a_tree():
    """Of width 2: columns 0 and 1 are the root's children, then two of each place."""
    parents = torch.tensor([[-1, -1, 1, 1, 0, 0, 4, 4, 2, 2], [-1, -1, 0, 0, 1, 1, 3, 3, 4, 4]])
    keep = torch.tensor([[True] * 10, [True, True, False, True, True, True, True, True, True, True]])
    key = torch.linspace(0.95, 0.05, 10).expand(2, 10)
    found = chain_by_layers(parents, keep, key, 2, 3, 4)
    # the likeliest child of column 0 is in column 4, and that one's in column 6
    chain = [0.95, 0.55, 0.35]
    assert found.shape == (2, 3, 4)
    assert found[0].flatten().tolist() == pytest.approx([*chain[:1], 0, 0, 0, *chain[:2], 0, 0, *chain, 0])
    # the other tree does not hold it any more
    assert found[1].flatten().tolist() == pytest.approx([0.95, 0, 0, 0] * 3)
    assert chain_by_layers(parents, ~keep, key, 2, 1, 4)[0].sum() == 0
    # of trees that may have fewer nodes than layers
    assert chain_by_layers(parents, keep, key, 2, 3, 2)[0].flatten().tolist() == pytest.approx(
        [0.95, 0, *chain[:2] * 2]
    )
