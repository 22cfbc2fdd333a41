"""Chains by hand, and against the scorer that serving uses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from c2t_plugin.lab.grow import grow_tree
from c2t_plugin.lab.policies.base import JointProb
from c2t_plugin.lab.policies.c2t import ThresholdTree
from c2t_plugin.lab.policies.chains import C2TChain, DyJoint, DyMax, EntropyStop, StaticChain
from c2t_plugin.scorer import ChainScorer
from tests.support.core.policy_toys import AFTER, ROOT, VOCAB, A, classifier_of

# chains: the greedy chain of the table is a .5, aa .6, aaa .6, ... ; P .5, .3, .18, .108, .0648


@pytest.mark.parametrize(
    ("policy", "length"),
    [
        (StaticChain(d_max=4), 4),
        (DyJoint(d_max=10, threshold=0.08), 4),
        (DyJoint(d_max=10, threshold=0.08, keep_failing=True), 5),
        (DyJoint(d_max=3, threshold=0.08, keep_failing=True), 3),
        (DyMax(d_max=10, threshold=0.55), 0),
        (DyMax(d_max=10, threshold=0.55, keep_failing=True), 1),
        (DyMax(d_max=10, threshold=0.4), 10),
        # H is 1.0297 after the root, .8979 after a
        (EntropyStop(d_max=10, max_entropy=1.0), 0),
        (EntropyStop(d_max=10, max_entropy=1.0, keep_failing=True), 1),
        (EntropyStop(d_max=10, max_entropy=1.1), 10),
    ],
)
def test_chains_by_hand(grown, policy, length) -> None:
    found, growth = grown(policy)
    assert found == [(A,) * (i + 1) for i in range(length)]
    # a pass that found nothing worth keeping was run all the same
    stopped_short = length < policy.d_max and not getattr(policy, "keep_failing", False)
    assert growth.passes.tolist() == [length + stopped_short]


def test_equality_goes_on(grown) -> None:
    uniform = (0.25,) * 4
    after = dict.fromkeys(range(4), uniform)
    entropy = float(torch.special.entr(torch.full((4,), 0.25)).sum())
    for policy in (
        DyMax(d_max=3, threshold=0.25),
        EntropyStop(d_max=3, max_entropy=entropy),
        ThresholdTree(d_max=3, score=JointProb(), beta=0.25**3, first_k=1),
        C2TChain(d_max=3, classifier=classifier_of("joint_prob", weights=(0.0,)), beta=0.5),
    ):
        assert len(grown(policy, uniform, after)[0]) == 3


def test_c2t_chain_drops_the_first_token_below_beta(grown) -> None:
    # C = sigmoid(10 P - 2): .953 at .5, .731 at .3, .450 at .18
    classifier = classifier_of("joint_prob", weights=(10.0,), bias=-2.0)
    assert len(grown(C2TChain(d_max=5, classifier=classifier, beta=0.5))[0]) == 2
    assert len(grown(C2TChain(d_max=5, classifier=classifier, beta=0.5, keep_failing=True))[0]) == 3
    assert C2TChain(d_max=5, classifier=classifier, beta=0.5).top_m == 3


@given(st.integers(0, 10), st.floats(0, 1), st.integers(1, 5))
def test_c2t_chains_are_as_long_as_the_serving_scorer_makes_them(path_draft, at_random, seed, beta, d_max) -> None:
    classifier = classifier_of("joint_prob", "entropy", "depth", "margin", weights=(3.0, -0.4, -0.3, 0.2), top_m=4)
    states, logits = 6, at_random(VOCAB, seed)
    tree = grow_tree(path_draft(states, logits), C2TChain(d_max=d_max, classifier=classifier, beta=beta)).tree
    scorer = ChainScorer(classifier, slots=states, rows=states, max_depth=d_max, beta=beta, device="cpu")
    greedy: list[tuple[int, ...]] = [()] * states
    slots = torch.arange(states)
    for depth in range(d_max):
        rows = torch.tensor([logits(state, path) for state, path in enumerate(greedy)])
        if depth == 0:
            scorer.write_seed(slots, rows)
            scorer.begin(slots)
        else:
            scorer.step(rows)
        greedy = [(*path, int(token)) for path, token in zip(greedy, rows.argmax(-1), strict=True)]
    assert tree.sizes().tolist() == scorer.end(states).tolist()


def test_a_sampled_chain_follows_the_draft_at_its_temperature(path_draft, from_table) -> None:
    states = 1000
    draft = path_draft(states, from_table(ROOT, AFTER))
    grown = grow_tree(draft, StaticChain(d_max=2, temperature=0.5), torch.Generator().manual_seed(0))
    tempered = torch.tensor(ROOT) ** 2 / (torch.tensor(ROOT) ** 2).sum()
    first = grown.tree.token_ids[:, 0].bincount(minlength=3) / states
    # five standard deviations
    assert (first - tempered).abs().max() < 5 * math.sqrt(0.25 / states)
    torch.testing.assert_close(grown.tree.log_probs[:, 0].exp(), tempered[grown.tree.token_ids[:, 0]])
    again = grow_tree(path_draft(states, from_table(ROOT, AFTER)), StaticChain(d_max=2, temperature=0.5),
                      torch.Generator().manual_seed(0))  # fmt: skip
    assert torch.equal(again.tree.token_ids, grown.tree.token_ids)
