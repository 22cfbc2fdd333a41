"""The growth loop, with policies small enough to be followed by eye."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.grow import grow_tree
from c2t_plugin.lab.policies.base import LayerPolicy, alive_where, top_children
from c2t_plugin.lab.token_tree import TokenTree
from c2t_plugin.lab.verify import Drafting, Draw

A, B, C = 0, 1, 2
ROOT = (0.5, 0.3, 0.2)
AFTER = {A: (0.6, 0.3, 0.1), B: (0.1, 0.2, 0.7), C: (0.2, 0.1, 0.7)}


@dataclass(frozen=True)
class Wide(LayerPolicy):
    """k children of every node."""

    k: int = 2

    def branch(self, growth, distributions):
        return top_children(growth, distributions, self.top_m, self.k)


@dataclass(frozen=True)
class OneByOne:
    """Adds and reads the most probable node not yet in the tree, one a call, from anywhere below what was read."""

    count: int
    top_m: int = 3
    drafting = Drafting(Draw.TOP_K)

    def branch(self, growth, distributions):
        waiting = growth.memory or []
        block = top_children(growth, distributions, self.top_m, 3)
        waiting.append(block)
        merged = TokenTree.join(waiting)
        pick = merged.joint_log_probs.argmax(1, keepdim=True)
        merged.joint_log_probs.scatter_(1, pick, -math.inf)
        growth.memory = [merged]
        chosen = {name: getattr(merged, name).gather(1, pick) for name in merged.__dataclass_fields__}
        joint = chosen["scores"].log()
        return TokenTree(**{**chosen, "joint_log_probs": joint})

    def expand(self, growth):
        width = 1 if growth.depth < self.count else 0
        return torch.full((growth.batch, width), growth.first)

    def finish(self, tree):
        return tree.alive


def table(path_draft, from_table, states=1, root=ROOT, after=AFTER):
    return path_draft(states, from_table(root, after))


def test_growth_is_the_one_written_by_hand(path_draft, from_table, paths) -> None:
    grown = grow_tree(table(path_draft, from_table), Wide(d_max=2))
    tree = grown.tree.validate()
    assert paths(tree) == [(A,), (B,), (A, A), (A, B), (B, C), (B, B)]
    expected = [0.5, 0.3, 0.30, 0.15, 0.21, 0.06]
    # float32 sums of logarithms
    torch.testing.assert_close(tree.joint_log_probs[0].exp(), torch.tensor(expected), atol=1e-6, rtol=0)
    torch.testing.assert_close(tree.scores[0], torch.tensor(expected), atol=1e-6, rtol=0)
    assert tree.rank.tolist() == [[0, 1] * 3]
    entropy = [-sum(p * math.log(p) for p in row) for row in (ROOT, AFTER[A], AFTER[B]) for _ in range(2)]
    torch.testing.assert_close(tree.entropy[0], torch.tensor(entropy), atol=1e-6, rtol=0)
    assert grown.passes.tolist() == [2]


def test_nodes_may_be_read_long_after_their_layer(path_draft, from_table, paths) -> None:
    grown = grow_tree(table(path_draft, from_table, states=2), OneByOne(6))
    # .5 a, .3 b or aa (the lower column), .3 the other, .21 bc, .2 c, .18 aaa
    expected = [(A,), (B,), (A, A), (B, C), (C,), (A, A, A)]
    for row in (0, 1):
        assert paths(grown.tree, row) == expected
    grown.tree.validate()
    assert grown.passes.tolist() == [6, 6]
    for column, path in enumerate(expected[:-1]):
        torch.testing.assert_close(grown.logits_after(1, column).softmax(0), torch.tensor(AFTER[path[-1]]))
    torch.testing.assert_close(grown.logits_after(0, -1).softmax(0), torch.tensor(ROOT))
    with pytest.raises(C2TError, match="node 5 of tree 0 was not drafted from"):
        grown.logits_after(0, 5)


def test_every_node_is_drawn_from_the_distribution_after_its_own_path(path_draft, at_random, paths) -> None:
    logits = at_random(5, 6)
    grown = grow_tree(path_draft(2, logits), Wide(d_max=4, k=2))
    for row in (0, 1):
        for column, path in enumerate(paths(grown.tree, row)):
            above = torch.tensor(logits(row, path[:-1])).log_softmax(-1)
            assert float(grown.tree.log_probs[row, column]) == pytest.approx(float(above[path[-1]]), abs=1e-6)


def test_states_that_end_early_are_padded(path_draft, at_random, paths) -> None:
    @dataclass(frozen=True)
    class Uneven(Wide):
        def branch(self, growth, distributions):
            block = super().branch(growth, distributions)
            # state i stops below depth i, and its second child of three never grows
            rows = torch.arange(growth.batch)[:, None]
            return alive_where(block, (growth.depth <= rows) & (block.rank != 1))

    logits = at_random(5, 0)
    grown = grow_tree(path_draft(4, logits), Uneven(d_max=3, k=3))
    grown.tree.validate()
    assert grown.tree.sizes().tolist() == [0, 2, 6, 14]
    assert grown.passes.tolist() == [1, 2, 3, 3]
    for row in (1, 2, 3):
        alone = grow_tree(path_draft(1, lambda state, path, row=row: logits(row, path)), Wide(d_max=row, k=3))
        every = paths(alone.tree)
        assert set(paths(grown.tree, row)) < set(every)
        again = alone.tree.joint_log_probs[0][[every.index(path) for path in paths(grown.tree, row)]]
        assert torch.equal(grown.tree.joint_log_probs[row][grown.tree.alive[row]], again)


def test_words_of_probability_zero_are_no_nodes(path_draft, from_table, paths) -> None:
    draft = table(path_draft, from_table, root=(0.6, 0.4, 0.0), after={A: (0.0, 1.0, 0.0), B: (0.2, 0.3, 0.5)})
    grown = grow_tree(draft, Wide(d_max=2, k=3))
    assert paths(grown.tree.validate()) == [(A,), (B,), (A, B), (B, C), (B, B), (B, A)]
    assert grown.tree.joint_log_probs[grown.tree.alive].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_has_no_children_and_leaves_the_others_alone(path_draft, at_random, paths, bad) -> None:
    logits = at_random(4, 1)

    def broken(state, path):
        return [bad, *logits(state, path)[1:]] if state == 1 and len(path) == 1 else logits(state, path)

    grown = grow_tree(path_draft(3, broken), Wide(d_max=3))
    whole = grow_tree(path_draft(3, logits), Wide(d_max=3))
    assert grown.tree.sizes().tolist() == [14, 2, 14]
    for row in (0, 2):
        assert paths(grown.tree, row) == paths(whole.tree, row)


def test_a_vocabulary_smaller_than_k_and_top_m(path_draft, at_random) -> None:
    grown = grow_tree(path_draft(2, at_random(3, 2)), Wide(d_max=2, k=10))
    assert grown.tree.sizes().tolist() == [12, 12]
    assert int(grown.tree.rank.max()) == 2


def test_a_policy_may_not_draft_from_a_dead_node_or_twice(path_draft, at_random) -> None:
    @dataclass(frozen=True)
    class Stubborn(Wide):
        column: int = 0

        def branch(self, growth, distributions):
            block = super().branch(growth, distributions)
            return alive_where(block, block.rank == 0)

        def expand(self, growth):
            return torch.full((growth.batch, 1), self.column)

    for column in (0, 1):
        with pytest.raises(C2TError, match="dead or was drafted from before"):
            grow_tree(path_draft(1, at_random(3, 3)), Stubborn(d_max=3, column=column))

    @dataclass(frozen=True)
    class Double(Wide):
        def expand(self, growth):
            return torch.zeros(growth.batch, 2, dtype=torch.int64)

    with pytest.raises(C2TError, match="twice at once"):
        grow_tree(path_draft(1, at_random(3, 3)), Double(d_max=3))


def test_distributions_need_not_be_kept(path_draft, at_random) -> None:
    kept, freed = (
        grow_tree(path_draft(2, at_random(4, 5)), Wide(d_max=3), keep_distributions=keep) for keep in (True, False)
    )
    assert torch.equal(kept.tree.token_ids, freed.tree.token_ids)
    assert len(kept.asked) == 3 and not freed.asked
    with pytest.raises(C2TError, match="were not kept"):
        freed.logits_after(0, -1)


def test_a_finish_that_is_not_ancestor_closed_is_refused(path_draft, at_random) -> None:
    @dataclass(frozen=True)
    class Headless(Wide):
        def finish(self, tree):
            return tree.depths > 1

    with pytest.raises(C2TError, match="without its parent"):
        grow_tree(path_draft(1, at_random(3, 3)), Headless(d_max=2))


def test_wasted_passes_are_those_beyond_the_first_mismatch(path_draft, at_random) -> None:
    grown = grow_tree(path_draft(3, at_random(5, 4)), Wide(d_max=4, k=1))
    # nothing accepted: the first pass proposed the token that failed, three more were thrown away
    assert grown.wasted_passes(torch.tensor([0, 3, 4])).tolist() == [3, 0, 0]
