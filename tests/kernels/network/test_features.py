"""The table of features: its order, which is the kernels' code, and what a node's statistics are made of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from c2t_kernels import DraftStats, draft_stats
from c2t_kernels.growth.kernel import grow_layer_kernel
from c2t_kernels.network import FEATURES, TABLE, PathSums, SiblingStats, children, extend_path, finite, node_features
from c2t_kernels.network.kernel import feature_codes
from c2t_kernels.score import ChainState, reference
from c2t_kernels.score import kernel as fused
from tests.support.kernels.networks import random_network

# A feature's place is its code in compiled kernels and in classifier files' networks: new ones go to the end.
CODES = (
    *("joint_prob", "joint_log_prob", "entropy", "depth", "prob"),
    *("log_prob", "rank", "margin", "path_entropy", "sibling_log_prob"),
)


def test_the_order_is_the_kernels_code():
    assert FEATURES == CODES
    assert all(feature.meaning for feature in TABLE)
    assert feature_codes(("entropy", "joint_prob", "margin")) == 0x702
    # four bits each in one integer
    assert len(FEATURES) <= 16


@pytest.mark.parametrize("kernel", [fused.score_chain_kernel, grow_layer_kernel])
def test_kernels_take_a_networks_tensors_in_its_order(kernel: Any, device: str):
    names = [f"p_{name}" for name in random_network(("rank",), 16, device).weights()]
    start = kernel.arg_names.index(names[0])
    assert len(names) == 6 and kernel.arg_names[start : start + 6] == names


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_alone_is_the_same_on_both_sides(name: str, device: str):
    network = random_network((name,), 16, device)
    logits = torch.randn(3, 9, 40, generator=torch.Generator().manual_seed(3)).to(device) * 4
    found, expected = (ChainState.create(9, 3, device) for _ in range(2))
    for depth, stats in enumerate((draft_stats(step, 20) for step in logits), start=1):
        for op, state in ((fused.score_chain, found), (reference.score_chain, expected)):
            op(state, network, stats.log_probs[:, 0], stats.entropy, stats.margin, depth)
    torch.testing.assert_close(found.confidence, expected.confidence, atol=5e-6, rtol=0)
    # a rank is 0 on every chain
    assert name == "rank" or expected.confidence.std() > 1e-4


# two nodes with two children each: a path of one token above the first, a root
ABOVE = PathSums(torch.tensor([-1.0, 0.0]), torch.tensor([0.5, 0.0]))
STATS = DraftStats(
    torch.tensor([[4, 7], [1, 2]]),
    torch.tensor([[-0.5, -2.0], [-0.25, -math.inf]]),
    torch.tensor([1.25, 0.75]),
    torch.tensor([1.5, math.inf]),
)


def test_children_worked_by_hand():
    node = children(ABOVE, STATS, 2)
    assert node.joint_log_prob.tolist() == [[-1.5, -3.0], [-0.25, -math.inf]]
    assert node.path_entropy.tolist() == [[1.75, 1.75], [0.75, 0.75]]
    assert node.log_prob.tolist() == STATS.log_probs.tolist()
    assert node.rank.tolist() == [[0, 1], [0, 1]] and node.depth.tolist() == [[2, 2], [2, 2]]
    assert node.entropy.tolist() == [[1.25, 1.25], [0.75, 0.75]]
    assert node.margin.tolist() == [[1.5, 1.5], [math.inf, math.inf]]
    assert node.leading_log_prob.tolist() == [[-0.5, -0.5], [-0.25, -0.25]]


def test_tokens_without_statistics_add_nothing_to_the_path():
    known = finite(STATS)
    assert known.tolist() == [[True, True], [True, False]]
    node = children(ABOVE, STATS, 2, known=known)
    assert node.joint_log_prob.tolist() == [[-1.5, -3.0], [-0.25, 0.0]]
    assert node.path_entropy.tolist() == [[1.75, 1.75], [0.75, 0.0]]


def test_drawn_tokens_share_what_their_distribution_says():
    drawn = torch.tensor([[-2.0], [-0.25]])
    node, listed = children(ABOVE, STATS, 2, log_probs=drawn), children(ABOVE, STATS, 2)
    assert node.joint_log_prob.tolist() == [[-3.0], [-0.25]] and node.rank.tolist() == [[0], [0]]
    for name in SiblingStats._fields:
        assert torch.equal(getattr(node, name), getattr(listed, name)[:, :1]), name


def test_a_path_of_plain_numbers_adds_up_too():
    path: Any = PathSums(0.0, 0.0)
    for log_prob, entropy in ((-1.0, 0.5), (-0.5, 1.25)):
        path = extend_path(path, log_prob, entropy)
    assert path == (-1.5, 1.75)


def test_features_keep_to_their_bounds():
    node = children(ABOVE, STATS, 2)
    found = dict(zip(FEATURES, node_features(FEATURES, node)[1, 1].tolist(), strict=True))
    assert found["log_prob"] == found["joint_log_prob"] == -50.0 and found["margin"] == 50.0
    assert found["prob"] == found["joint_prob"] == 0.0


def test_a_share_among_siblings_is_of_the_two_most_probable():
    logits = torch.tensor([[2.0, 1.0, 0.5, -math.inf], [0.0, -math.inf, -math.inf, -math.inf]])
    probs = logits.softmax(-1)
    for k in (1, 2, 4):
        # a tree's number of children decides nothing, nor does what was drawn
        found = shares(draft_stats(logits, 4, k))
        expected = (probs[:, :k] / probs[:, :2].sum(-1, keepdim=True)).log().clamp_min(-50)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    drawn = logits.log_softmax(-1)[:, 2:3]
    torch.testing.assert_close(shares(draft_stats(logits, 4, 1), drawn)[0, 0], (probs[0, 2] / probs[0, :2].sum()).log())


def shares(stats: DraftStats, drawn: torch.Tensor | None = None) -> torch.Tensor:
    above = PathSums(*torch.zeros(2, len(stats.entropy)))
    return node_features(["sibling_log_prob"], children(above, stats, 1, log_probs=drawn))[..., 0]
