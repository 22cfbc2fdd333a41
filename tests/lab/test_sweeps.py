"""Sweeps against plain loops over nodes: what a rule keeps at every setting."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from c2t_plugin.classifier import NodeStats
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.policies.c2t import ThresholdTree
from c2t_plugin.lab.replay import replay_trees
from c2t_plugin.lab.sweeps import (
    censored,
    eagle2_sweep,
    kept_nodes,
    path_minimum,
    static_sweep,
    threshold_sweep,
    thresholds,
    top_k_sweep,
    truncate,
)
from c2t_plugin.traces.forest import TABLES, Forest


def parents_of(forest: Forest, tree: int) -> list[int]:
    return [int(forest.parent_ids[tree, node // forest.k]) for node in range(forest.accepted.shape[1])]


def kept_by_hand(forest: Forest, tree: int, scores: list[float], beta: float, top_k: int | None = None) -> set[int]:
    """One layer after another: a node needs a parent that was kept; of these, the top_k most confident of a layer."""
    parents, depths = parents_of(forest, tree), forest.depth.int().tolist()
    # ranks from the root: in this order the tree that is grown lists a layer's nodes
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), node % forest.k))
    kept: list[int] = [-1]
    for depth in range(1, forest.layers + 1):
        layer = [
            node for node, at in enumerate(depths) if at == depth and parents[node] in kept and not scores[node] < beta
        ]
        kept += sorted(layer, key=lambda node: (-scores[node], paths[node]))[:top_k]
    return set(kept[1:])


def random_scores(forest: Forest, seed: int = 0) -> torch.Tensor:
    # in steps of a tenth, so that many are equal
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, forest.accepted.shape, generator=generator) / 10


@pytest.mark.parametrize("part", ["tree", "chain"])
def test_a_threshold_keeps_whole_paths(make_traces, part) -> None:
    forest = getattr(make_traces(k=3), part)
    scores = random_scores(forest)
    levels = torch.tensor([0.0, 0.1, 0.35, 0.5, 1.0, torch.inf])
    found = threshold_sweep(forest, scores, levels)
    for setting, level in enumerate(levels.tolist()):
        for tree in range(len(forest)):
            kept = kept_by_hand(forest, tree, scores[tree].tolist(), level)
            assert int(found.gamma[setting, tree]) == len(kept)
            assert int(found.tau[setting, tree]) == sum(bool(forest.accepted[tree, node]) for node in kept)
    assert 0 < int(found.tau.sum()) < int(found.gamma.sum())


def test_a_score_that_is_no_number_keeps_its_node(make_traces) -> None:
    forest = make_traces().tree
    scores = torch.zeros(forest.accepted.shape)
    scores[:, 0] = float("nan")
    found = threshold_sweep(forest, scores, torch.tensor([0.5]))
    assert found.gamma.tolist() == [[1] * len(forest)]


def test_path_minimum_by_recursion(make_traces) -> None:
    forest = make_traces(k=3, layers=5).tree
    scores = random_scores(forest, seed=3)
    lowest = path_minimum(forest, scores)
    for tree in range(len(forest)):
        parents, expected = parents_of(forest, tree), []
        for node, parent in enumerate(parents):
            above = expected[parent] if parent >= 0 else math.inf
            expected.append(min(above, float(scores[tree, node])))
        assert lowest[tree].tolist() == expected


def test_the_failing_token_of_a_chain(make_traces) -> None:
    chain = make_traces(prompts=6, layers=4).chain
    scores = random_scores(chain)
    levels = torch.tensor([0.0, 0.5, torch.inf])
    dropped, kept = (threshold_sweep(chain, scores, levels, keeps_failing=keeps) for keeps in (False, True))
    assert torch.equal(kept.gamma, (dropped.gamma + 1).clamp_max(4))
    assert torch.equal(kept.tau, torch.minimum(kept.gamma, chain.accepted.sum(1).short()))
    assert not torch.equal(kept.tau, dropped.tau)


def test_the_failing_token_of_a_tree_is_refused(make_traces) -> None:
    forest = make_traces().tree
    with pytest.raises(C2TError, match="chains only"):
        threshold_sweep(forest, random_scores(forest), keeps_failing=True)


def test_static_chains_have_every_length(make_traces) -> None:
    chain = make_traces().chain
    found = static_sweep(chain)
    runs = chain.accepted.sum(1).tolist()
    assert found.gamma.tolist() == [[length] * len(chain) for length in (1, 2, 3, 4)]
    assert found.tau.tolist() == [[min(length, run) for run in runs] for length in (1, 2, 3, 4)]


def test_eagle2_keeps_the_most_probable_nodes(make_traces) -> None:
    forest = make_traces(k=3).tree
    forest.joint_log_prob[0, 5:9] = forest.joint_log_prob[0, 5]
    found = eagle2_sweep(forest)
    for tree in range(len(forest)):
        probs = forest.joint_log_prob[tree].tolist()
        order = sorted(range(len(probs)), key=lambda node: (-probs[node], node))
        hits = np.cumsum([int(forest.accepted[tree, node]) for node in order])
        assert found.tau[:, tree].tolist() == hits.tolist()
    assert found.gamma[:, 0].tolist() == list(range(1, forest.accepted.shape[1] + 1))


@pytest.mark.parametrize("top_k", [None, 1, 2, 4])
def test_the_second_top_k(make_traces, top_k) -> None:
    forest = make_traces(k=3, layers=4).tree
    scores = random_scores(forest, seed=1)
    for beta in (0.0, 0.3, 0.6):
        kept = kept_nodes(forest, scores, beta, top_k)
        for tree in range(len(forest)):
            expected = kept_by_hand(forest, tree, scores[tree].tolist(), beta, top_k)
            assert set(kept[tree].nonzero().flatten().tolist()) == expected


def test_a_confidence_that_is_no_number_comes_first(make_traces) -> None:
    forest = make_traces(k=3).tree
    scores = torch.ones(forest.accepted.shape)
    scores[:, 2] = float("nan")
    kept = kept_nodes(forest, scores, 0.5, top_k=1)
    assert kept[:, :3].tolist() == [[False, False, True]] * len(forest)


@dataclass(frozen=True)
class Steps:
    """P rounded down to steps, so that many nodes are equal, or the draft probability, which grows from node to node
    where P does not."""

    joint: bool
    steps: int

    def __call__(self, stats: NodeStats) -> torch.Tensor:
        return ((stats.joint_log_prob if self.joint else stats.log_prob).exp() * self.steps).floor() / self.steps


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("steps", [4, 10, 2**20])
@pytest.mark.parametrize("second_k", [None, 1, 2, 3, 5])
def test_c2t_trees_are_the_replayed_ones(make_traces, joint, steps, second_k) -> None:
    forest, score = make_traces(prompts=8, k=3).tree, Steps(joint, steps)
    compared = 0
    for beta in (0.0, 0.02, 0.25):
        policy = ThresholdTree(d_max=4, score=score, beta=beta, first_k=3, second_k=second_k, top_m=4)
        replayed = replay_trees(forest, policy, 4)
        kept = kept_nodes(forest, score(forest.stats()), beta, second_k)
        whole = replayed.missing == 0
        outcomes = replayed.outcomes()
        assert torch.equal((kept & forest.accepted).sum(1)[whole], outcomes.accepted[whole])
        for row in whole.nonzero().flatten().tolist():
            columns = kept[row].nonzero().flatten().tolist()
            found = paths_of(forest.token_ids[row].tolist(), parents_of(forest, row))
            tree = replayed.tree
            grown = paths_of(tree.token_ids[row].tolist(), tree.parent_ids[row].tolist())
            alive = tree.alive[row].nonzero().flatten().tolist()
            assert sorted(found[column] for column in columns) == sorted(grown[column] for column in alive)
            compared += len(columns)
    assert compared


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_without_second_top_k_both_ways_agree(make_traces) -> None:
    forest = make_traces(k=3, layers=4).tree
    scores = random_scores(forest, seed=2)
    betas = [0.0, 0.2, 0.5, 0.9]
    slow, fast = top_k_sweep(forest, scores, betas, None), threshold_sweep(forest, scores, torch.tensor(betas))
    assert torch.equal(slow.gamma, fast.gamma) and torch.equal(slow.tau, fast.tau)
    fewer = top_k_sweep(forest, scores, betas, 1)
    assert (fewer.gamma <= fast.gamma).all() and not torch.equal(fewer.gamma, fast.gamma)


def test_where_the_record_ends(make_traces) -> None:
    forest = make_traces(k=3, layers=4).tree
    kept = kept_nodes(forest, random_scores(forest), 0.3)
    inner = blind = states = 0
    for tree in range(len(forest)):
        expanded = set(forest.parent_ids[tree].tolist())
        nodes = [node for node in kept[tree].nonzero().flatten().tolist() if forest.depth[node] < forest.layers]
        inner += len(nodes)
        blind += sum(node not in expanded for node in nodes)
        hits = [node for node in kept[tree].nonzero().flatten().tolist() if forest.accepted[tree, node]]
        if hits and hits[-1] in nodes and hits[-1] not in expanded:
            states += 1
    found = censored(forest, kept)
    assert found.nodes == pytest.approx(blind / inner) and 0 < blind < inner
    assert found.states == pytest.approx(states / len(forest))


def test_a_truncated_tree_is_the_shallower_one(make_traces) -> None:
    deep, shallow = make_traces(layers=4).tree, make_traces(layers=3).tree
    found = truncate(deep, 3)
    for name in TABLES:
        # what the target says depends on how far it was asked
        if name != "accepted":
            assert torch.equal(getattr(found, name), getattr(shallow, name)), name
    assert torch.equal(found.accepted, deep.accepted[:, deep.depth <= 3])
    assert torch.equal(truncate(deep, 4).accepted, deep.accepted)


@pytest.mark.parametrize("depth", [0, 5])
def test_a_depth_that_was_not_recorded_is_refused(make_traces, depth) -> None:
    with pytest.raises(C2TError, match="between 1 and the recorded 4"):
        truncate(make_traces().tree, depth)


def test_thresholds_reach_from_everything_to_nothing(make_traces) -> None:
    forest = make_traces(prompts=8).tree
    found = threshold_sweep(forest, random_scores(forest))
    assert found.settings.tolist() == sorted(set(found.settings.tolist()))
    assert found.gamma[0].tolist() == [forest.accepted.shape[1]] * len(forest)
    assert found.gamma[-1].tolist() == [0] * len(forest)


def test_thresholds_need_a_number() -> None:
    with pytest.raises(C2TError, match="no finite score"):
        thresholds(torch.full((3,), float("nan")))
