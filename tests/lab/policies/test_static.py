"""Static trees and drawn children."""

from __future__ import annotations

import math
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from c2t_plugin.lab.grow import grow_tree
from c2t_plugin.lab.policies.presets import EAGLE1_PATHS, preset
from c2t_plugin.lab.policies.specinfer import SpecInfer
from c2t_plugin.lab.policies.static import FixedBranching, IndependentSequences, StaticTree
from tests.support.core.policy_toys import AFTER, ROOT, VOCAB, A, B, C, by_rank


def test_eagle1s_tree_has_25_drafts_and_five_layers(path_draft, at_random, paths) -> None:
    assert len(EAGLE1_PATHS) == 25
    logits = at_random(5, 0)
    policy = preset("eagle1").policy()
    grown = grow_tree(path_draft(2, logits), policy)
    assert grown.tree.sizes().tolist() == [25, 25]
    assert Counter(grown.tree.depths[0][grown.tree.alive[0]].tolist()) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    for row in (0, 1):
        assert set(paths(grown.tree, row)) == {by_rank(logits, row, path) for path in EAGLE1_PATHS}


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
