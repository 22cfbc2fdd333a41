"""EAGLE-2, C2T and entropy-shaped trees: by hand, and against brute force on tiny vocabularies."""

from __future__ import annotations

import math
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from c2t_plugin.lab.grow import grow_tree
from c2t_plugin.lab.policies.base import JointProb
from c2t_plugin.lab.policies.c2t import C2TTree, ThresholdTree
from c2t_plugin.lab.policies.eagle2 import Eagle2
from c2t_plugin.lab.policies.entropy import DynamicWidth, DynamicWidthDepth, NaiveWidth
from c2t_plugin.lab.policies.presets import preset
from tests.support.core.policy_toys import VOCAB, A, B, C, classifier_of


def test_eagle2_by_hand(grown) -> None:
    # P: a .5 b .3; aa .30 ab .15 bc .21 bb .06; aaa .18 aab .09 bcc .147 bca .042
    every = [(A,), (B,), (A, A), (A, B), (B, C), (B, B), (A, A, A), (A, A, B), (B, C, C), (B, C, A)]
    found, growth = grown(Eagle2(d_max=3, k=2, max_nodes=100))
    assert found == every and growth.passes.tolist() == [3]
    assert grown(Eagle2(d_max=3, k=2, max_nodes=6))[0] == [(A,), (B,), (A, A), (A, B), (B, C), (A, A, A)]


@settings(max_examples=40)
@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 4), st.integers(1, 40))
def test_eagle2_against_brute_force(path_draft, at_random, paths, seed, k, d_max, max_nodes) -> None:
    logits = at_random(VOCAB, seed)
    tree = grow_tree(path_draft(1, logits), Eagle2(d_max=d_max, k=k, max_nodes=max_nodes)).tree.validate()
    every: dict[tuple[int, ...], float] = {}
    frontier = {(): 0.0}
    for _ in range(d_max):
        layer = {}
        for path, above in frontier.items():
            own = torch.tensor(logits(0, path)).log_softmax(-1).tolist()
            for token in sorted(range(VOCAB), key=lambda token: -own[token])[:k]:
                layer[(*path, token)] = above + own[token]
        every |= layer
        frontier = dict(sorted(layer.items(), key=lambda item: -item[1])[:k])
    expected = sorted(every, key=lambda path: -every[path])[:max_nodes]
    assert sorted(paths(tree)) == sorted(expected)


def test_ties_go_to_the_lower_column(grown) -> None:
    uniform = (0.25,) * 4
    found, growth = grown(Eagle2(d_max=3, k=2, max_nodes=5), uniform, dict.fromkeys(range(4), uniform))
    tree = growth.tree
    assert tree.alive[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    certain = (1.0, 0.0, 0.0)
    found, _ = grown(Eagle2(d_max=4, k=2, max_nodes=2), certain, dict.fromkeys(range(3), certain))
    assert found == [(A,), (A, A)], "a parent as likely as its child comes first"


# C2T trees


def test_the_pruning_of_c2ts_figure_3(grown) -> None:
    """The figure's steps on our table: beta .5 and K = 2, layer by layer, ending where no node passes."""
    # C = sigmoid(10 P - 2): P >= .2 passes
    policy = C2TTree(
        d_max=10, classifier=classifier_of("joint_prob", weights=(10.0,), bias=-2.0), beta=0.5, first_k=2, second_k=2
    )
    found, growth = grown(policy)
    # below a .30 .15, below b .21 .06; then aaa .18, bcc .147: none passes, and growth ends early
    assert found == [(A,), (B,), (A, A), (B, C)]
    assert growth.passes.tolist() == [3]


def test_each_pruning_can_be_switched(grown) -> None:
    def tree(**options):
        return set(grown(ThresholdTree(score=JointProb(), **{"d_max": 2, "beta": 0.1, **options}))[0])

    assert tree(first_k=None) == {(A,), (B,), (C,), (A, A), (A, B), (B, C), (C, C)}
    assert tree(first_k=1) == {(A,), (A, A)}
    assert tree(first_k=2) == {(A,), (B,), (A, A), (A, B), (B, C)}
    assert tree(first_k=2, second_k=1) == {(A,), (A, A)}
    assert tree(first_k=None, beta=0.0) == {(x,) for x in range(3)} | {(x, y) for x in range(3) for y in range(3)}
    assert tree(beta=0.6) == set()


@settings(max_examples=40)
@given(st.integers(0, 20), st.sampled_from([None, 1, 2, 3]), st.sampled_from([None, 1, 2, 5]), st.floats(0, 1))
def test_c2t_trees_against_brute_force(path_draft, at_random, paths, seed, first_k, second_k, beta) -> None:
    classifier = classifier_of("joint_prob", "entropy", "depth", weights=(4.0, 0.5, -0.5), top_m=VOCAB)
    logits = at_random(VOCAB, seed)
    policy = C2TTree(d_max=3, classifier=classifier, beta=beta, first_k=first_k, second_k=second_k)
    tree = grow_tree(path_draft(1, logits), policy).tree.validate()
    kept: list[tuple[int, ...]] = []
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in (1, 2, 3):
        scores, joint = {}, {}
        for path, above in frontier.items():
            probs = torch.tensor(logits(0, path), dtype=torch.float64).softmax(-1)
            entropy = float(torch.special.entr(probs).sum())
            for token in probs.argsort(descending=True).tolist()[:first_k]:
                p = above * float(probs[token])
                joint[*path, token] = p
                scores[*path, token] = 1 / (1 + math.exp(-(4 * p + 0.5 * entropy - 0.5 * depth)))
        # float32 against float64 may differ at the threshold itself
        if any(abs(score - beta) < 1e-6 for score in scores.values()):
            return
        passed = sorted((path for path in scores if scores[path] >= beta), key=lambda path: -scores[path])[:second_k]
        kept += passed
        frontier = {path: joint[path] for path in passed}
    assert sorted(paths(tree)) == sorted(kept)


def test_beta_zero_and_one_are_the_ends(path_draft, at_random) -> None:
    classifier = classifier_of("joint_prob", weights=(1.0,))
    for beta, size in ((0.0, 3 + 9), (1.0, 0)):
        policy = C2TTree(d_max=2, classifier=classifier, beta=beta, first_k=3)
        assert grow_tree(path_draft(2, at_random(VOCAB, 0)), policy).tree.sizes().tolist() == [size] * 2


# entropy-shaped trees


def test_the_papers_branching_factor() -> None:
    policy = preset("dynamic-width").policy()
    entropies = [0.0, 0.019, 0.02, 0.5, 0.999, 1.0, 1.2, 1.3, 1.5, 1.75, 9.0]
    assert policy.width(torch.tensor(entropies)).tolist() == [1, 1, 2, 2, 2, 4, 5, 6, 6, 7, 7]


def sharpness(p: float, vocab: int = 8) -> tuple[float, ...]:
    """p for token 0, the rest shared almost evenly: of equally probable tokens any may come first."""
    weights = [1 - 0.001 * i for i in range(vocab - 1)]
    return (p, *((1 - p) * weight / sum(weights) for weight in weights))


# entropies in nats: .999 -> .010; .9 -> .520; .6 -> 1.451
SURE, LIKELY, LOST = sharpness(0.999), sharpness(0.9), sharpness(0.6)


def test_dynamic_width_by_hand(grown) -> None:
    after = {0: SURE, 1: LOST, **dict.fromkeys(range(2, 8), LIKELY)}
    found, growth = grown(DynamicWidth(d_max=2), LIKELY, after)
    # two below the root; one below 0 (.010); ceil(4 * 1.451) = 6 below 1
    assert Counter(path[:-1] for path in found) == {(): 2, (0,): 1, (1,): 6}
    assert growth.passes.tolist() == [2]


def test_dynamic_depth_ends_a_branch_that_is_lost(grown) -> None:
    after = {0: LIKELY, 1: LOST, **dict.fromkeys(range(2, 8), LIKELY)}
    found, _ = grown(DynamicWidthDepth(d_max=3, max_entropy=1.0), LIKELY, after)
    assert Counter(path[:-1] for path in found) == {(): 2, (0,): 2, (0, 0): 2}
    wide, _ = grown(DynamicWidthDepth(d_max=3, max_entropy=1.0, keep_failing=True), LIKELY, after)
    assert Counter(path[:-1] for path in wide) == {(): 2, (0,): 2, (1,): 6, (0, 0): 2, (0, 1): 6}


def test_naive_width_ends_in_k_tokens(grown) -> None:
    after = {0: LIKELY, **dict.fromkeys(range(1, 8), LOST)}
    policy = NaiveWidth(d_max=4, k=3, max_entropy=1.0)
    assert grown(policy, LIKELY, after)[0] == [(0,) * n for n in (1, 2, 3, 4)]
    found, growth = grown(policy, LIKELY, {0: LOST})
    assert found == [(0,), (0, 0), (0, 1), (0, 2)]
    assert growth.passes.tolist() == [2]
