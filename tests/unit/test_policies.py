"""Every policy by hand, and against brute force on tiny vocabularies."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.errors import ConfigError
from c2t_plugin.grow import grow_tree
from c2t_plugin.policies.base import JointProb
from c2t_plugin.policies.c2t import C2TTree, ThresholdTree
from c2t_plugin.policies.chain import ChainScorer
from c2t_plugin.policies.chains import C2TChain, DyJoint, DyMax, EntropyStop, StaticChain
from c2t_plugin.policies.eagle2 import Eagle2
from c2t_plugin.policies.entropy import DynamicWidth, DynamicWidthDepth, NaiveWidth
from c2t_plugin.policies.presets import EAGLE1_PATHS, PRESETS, preset
from c2t_plugin.policies.specinfer import SpecInfer
from c2t_plugin.policies.static import FixedBranching, IndependentSequences, StaticTree

A, B, C, D = 0, 1, 2, 3
ROOT = (0.5, 0.3, 0.2)
AFTER = {A: (0.6, 0.3, 0.1), B: (0.1, 0.2, 0.7), C: (0.2, 0.1, 0.7)}
VOCAB = 4


@pytest.fixture
def grown(path_draft, from_table, paths):
    """Paths that a policy verifies on the hand-written draft, and the growth."""

    def run(policy, root=ROOT, after=AFTER):
        found = grow_tree(path_draft(1, from_table(root, after)), policy)
        return paths(found.tree.validate()), found

    return run


def classifier_of(*features: str, weights: tuple[float, ...], bias: float = 0.0, top_m: int = 3) -> NodeClassifier:
    """sigmoid(weights . features + bias); one hidden unit a feature and sign, so that the ReLU loses nothing."""
    n = len(features)
    spec = ClassifierSpec(features=features, shift=(0.0,) * n, scale=(1.0,) * n, hidden=2 * n, top_m=top_m)
    model = NodeClassifier(spec)
    with torch.no_grad():
        model.hidden.weight.copy_(torch.cat([torch.eye(n), -torch.eye(n)]))
        model.hidden.bias.zero_()
        model.out.weight.copy_(torch.tensor([[*weights, *(-w for w in weights)]]))
        model.out.bias.fill_(bias)
    return model.eval().requires_grad_(False)


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


# static trees


def test_eagle1s_tree_has_25_drafts_and_five_layers(path_draft, at_random, paths) -> None:
    assert len(EAGLE1_PATHS) == 25
    logits = at_random(5, 0)
    policy = preset("eagle1").policy()
    grown = grow_tree(path_draft(2, logits), policy)
    assert grown.tree.sizes().tolist() == [25, 25]
    assert Counter(grown.tree.depths[0][grown.tree.alive[0]].tolist()) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    for row in (0, 1):
        assert set(paths(grown.tree, row)) == {by_rank(logits, row, path) for path in EAGLE1_PATHS}


def by_rank(logits, row, ranks):
    """Tokens on the way to a node given by ranks."""
    path = ()
    for rank in ranks:
        order = sorted(range(len(logits(row, path))), key=lambda token: -logits(row, path)[token])
        path = (*path, order[rank])
    return path


def test_a_place_without_a_word_stays_empty_with_all_below(grown) -> None:
    policy = StaticTree(paths=((0,), (1,), (2,), (2, 0), (1, 0)))
    found, _ = grown(policy, root=(0.5, 0.5, 0.0))
    assert found == [(A,), (B,), (B, C)]
    wide = StaticTree(paths=tuple((rank,) for rank in range(6)))
    assert grown(wide)[0] == [(A,), (B,), (C,)]


@settings(max_examples=40)
@given(st.data())
def test_any_static_tree_is_drafted_as_given(path_draft, at_random, paths, data) -> None:
    chosen: list[tuple[int, ...]] = []
    for _ in range(data.draw(st.integers(1, 10))):
        above = data.draw(st.sampled_from([(), *chosen]))
        path = (*above, data.draw(st.integers(0, VOCAB - 1)))
        chosen += [path] if path not in chosen else []
    order = data.draw(st.permutations(chosen))
    logits = at_random(VOCAB, data.draw(st.integers(0, 5)))
    grown = grow_tree(path_draft(2, logits), StaticTree(paths=tuple(order)))
    for row in (0, 1):
        assert sorted(paths(grown.tree, row)) == sorted(by_rank(logits, row, path) for path in chosen)


def test_fixed_branching_and_sequences_by_count(grown) -> None:
    found, growth = grown(FixedBranching(width=2, depth=4))
    assert Counter(map(len, found)) == {1: 2, 2: 4, 3: 8, 4: 16}
    assert growth.passes.tolist() == [4]
    assert grown(IndependentSequences(sequences=2, length=3))[0] == [(A,), (B,), (A, A), (B, C), (A, A, A), (B, C, C)]
    assert Counter(map(len, grown(SpecInfer(branches=(1, 3, 1)))[0])) == {1: 1, 2: 3, 3: 3}


def test_independent_sequences_are_drawn_independently(path_draft, from_table, paths) -> None:
    states = 1500
    policy = IndependentSequences(sequences=2, length=2, temperature=1.0)
    grown = grow_tree(path_draft(states, from_table(ROOT, AFTER)), policy, torch.Generator().manual_seed(1))
    pairs = Counter(tuple(row) for row in grown.tree.token_ids[:, :2].tolist())
    for first, p in enumerate(ROOT):
        for second, q in enumerate(ROOT):
            # five standard deviations
            assert abs(pairs[first, second] / states - p * q) < 5 * math.sqrt(p * q / states)
    assert grown.tree.parent_ids[:, 2:].tolist() == [[0, 1]] * states


def test_siblings_without_replacement_follow_successive_draws(path_draft, from_table) -> None:
    states = 1500
    policy = StaticTree(paths=((0,), (1,)), temperature=1.0)
    grown = grow_tree(path_draft(states, from_table(ROOT, AFTER)), policy, torch.Generator().manual_seed(2))
    pairs = Counter(tuple(row) for row in grown.tree.token_ids[:, :2].tolist())
    for first, p in enumerate(ROOT):
        for second, q in enumerate(ROOT):
            expected = 0.0 if first == second else p * q / (1 - p)
            assert abs(pairs[first, second] / states - expected) <= 5 * math.sqrt(expected / states)


def test_sampling_survives_a_broken_row_and_missing_words(path_draft) -> None:
    def logits(state, path):
        return [math.nan, 0.0, 0.0] if state == 0 else [0.0, -math.inf, -math.inf]

    for policy in (IndependentSequences(sequences=2, length=2, temperature=1.0),
                   StaticTree(paths=((0,), (1,), (0, 0)), temperature=1.0)):  # fmt: skip
        tree = grow_tree(path_draft(2, logits), policy, torch.Generator().manual_seed(0)).tree.validate()
        assert tree.sizes()[0] == 0 and tree.sizes()[1] > 0
        assert set(tree.token_ids[1][tree.alive[1]].tolist()) == {A}


# EAGLE-2


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


# all of them


def every_policy():
    classifier = classifier_of("joint_prob", "entropy", "depth", weights=(6.0, 0.3, -0.2), bias=-2.5, top_m=5)
    for name, item in PRESETS.items():
        changes = {} if item.needs_classifier else {"top_m": 5}
        # the others of table 2 differ in one number
        if not name.endswith(("70b", "13b", "33b")):
            yield pytest.param(item.policy(classifier, **changes), id=name)
    yield pytest.param(IndependentSequences(sequences=3, length=2), id="sequences")
    yield pytest.param(StaticChain(d_max=3, temperature=0.7), id="sampled-chain")


@pytest.mark.parametrize("policy", list(every_policy()))
@pytest.mark.parametrize("vocab", [1, 3, 9])
def test_every_policy_keeps_the_trees_promises(policy, vocab, path_draft, at_random, paths) -> None:
    logits = at_random(vocab, 7, 1.5)

    def run():
        return grow_tree(path_draft(3, logits), policy, torch.Generator().manual_seed(0))

    grown = run()
    tree = grown.tree.validate()
    d_max = getattr(policy, "d_max", None)
    assert int((tree.depths * tree.alive).max()) <= d_max
    assert int(grown.passes.max()) <= d_max
    assert int(tree.sizes().max()) <= getattr(policy, "max_nodes", math.inf)
    assert torch.isfinite(tree.joint_log_probs[tree.alive]).all()
    siblings = Counter(zip(*(value[tree.alive].tolist() for value in (tree.parent_ids, tree.rank)), strict=True))
    assert max(siblings.values(), default=0) <= tree.batch
    again = run().tree
    assert all(torch.equal(getattr(tree, item.name), getattr(again, item.name)) for item in dataclasses.fields(tree))
    if not getattr(policy, "temperature", 0.0):
        alone = grow_tree(path_draft(1, lambda state, path: logits(2, path)), policy).tree
        assert paths(alone) == paths(tree, 2), "the rest of the batch changes nothing"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StaticChain(d_max=0), "d_max must be an integer of at least 1"),
        (lambda: StaticChain(d_max=2, temperature=-1.0), "temperature must be a number of at least 0"),
        (lambda: StaticChain(d_max=2, top_m=0), "top_m must be an integer"),
        (lambda: DyMax(d_max=2, threshold=1.5), r"threshold must be a number in \[0.0, 1.0\], got 1.5"),
        (lambda: DyJoint(d_max=2, threshold=math.nan), "threshold must be a number"),
        (lambda: EntropyStop(d_max=2, max_entropy=-0.1), "max_entropy must be a number of at least 0"),
        (lambda: Eagle2(d_max=2, max_nodes=0), "max_nodes must be an integer of at least 1"),
        (lambda: Eagle2(d_max=2, k=True, max_nodes=3), "k must be an integer"),
        (lambda: ThresholdTree(d_max=2, score=JointProb(), beta=2.0), "beta must be a number"),
        (lambda: ThresholdTree(d_max=2, score=JointProb(), beta=0.5, first_k=0), "first_k must be an integer"),
        (lambda: ThresholdTree(d_max=2, score=JointProb(), beta=0.5, second_k=0), "second_k must be an integer"),
        (lambda: StaticTree(paths=()), "at least one is needed"),
        (lambda: StaticTree(paths=((0,), (0,))), "none twice"),
        (lambda: StaticTree(paths=((0,), (1, 0))), r"path \(1, 0\) must be ranks"),
        (lambda: StaticTree(paths=((-1,),)), r"path \(-1,\) must be ranks"),
        (lambda: SpecInfer(branches=(1, 0)), "branches must be integers of at least 1"),
        (lambda: FixedBranching(width=2, depth=0), "depth must be an integer of at least 1"),
        (lambda: IndependentSequences(sequences=0, length=2), "sequences must be an integer of at least 1"),
        (lambda: DynamicWidth(d_max=2, sure=2.0), r"sure \(2.0\) must not exceed unsure"),
        (lambda: NaiveWidth(d_max=2, k=0, max_entropy=1.0), "k must be an integer"),
        (lambda: preset("c2t").policy(), "needs a classifier"),
        (lambda: preset("c3t"), "no preset 'c3t'; there are c2t"),
    ],
)
def test_bad_settings_are_refused(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
