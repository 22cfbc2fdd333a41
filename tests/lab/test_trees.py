"""Growth and labels of whole trees."""

from __future__ import annotations

import math

import pytest
import torch

from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.lab.plans import TreeShape
from c2t_plugin.lab.report import forest_features
from c2t_plugin.lab.trees import grow
from c2t_plugin.traces.forest import Forest, distribution_count, join, node_count

A, B, C = 0, 1, 2
# probabilities of a, b, c after the last token of the path; after the root
AFTER = {A: (0.6, 0.3, 0.1), B: (0.1, 0.2, 0.7), C: (0.2, 0.1, 0.7)}
ROOT = (0.5, 0.3, 0.2)


def table_logits(state, path):
    return [math.log(p) for p in (AFTER[path[-1]] if path else ROOT)]


def paths_of(forest: Forest, tree: int) -> list[tuple[int, ...]]:
    """Tokens from below the root to each node, from parent_ids and token_ids alone."""
    paths: list[tuple[int, ...]] = []
    for node, token in enumerate(forest.token_ids[tree].tolist()):
        parent = int(forest.parent_ids[tree, node // forest.k])
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.fixture
def small(toy_draft):
    """Two equal trees of k = 2 and 3 layers; the target says a b a below one root, b c a below the other."""
    continuation = torch.tensor([[A, B, A], [B, C, A]])
    return grow(toy_draft(2, table_logits), continuation, TreeShape(k=2, layers=3, top_m=2))


@pytest.mark.parametrize("tree", [0, 1])
def test_growth_is_the_one_written_by_hand(small, tree) -> None:
    # layer 2 expands aa (.30) and bc (.21), not ab (.15): the best two of the layer, not of each parent
    expected = {
        (A,): 0.5,
        (B,): 0.3,
        (A, A): 0.30,
        (A, B): 0.15,
        (B, C): 0.21,
        (B, B): 0.06,
        (A, A, A): 0.18,
        (A, A, B): 0.09,
        (B, C, C): 0.147,
        (B, C, A): 0.042,
    }
    assert paths_of(small, tree) == list(expected)
    assert small.parent_ids[tree].tolist() == [-1, 0, 1, 2, 4]
    # float32 sums of logarithms
    torch.testing.assert_close(small.joint_log_prob[tree].exp(), torch.tensor([*expected.values()]), atol=1e-6, rtol=0)


def test_statistics_are_those_written_by_hand(small) -> None:
    stats = small.stats()
    assert stats.depth[0].tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert stats.rank[0].tolist() == [0, 1] * 5
    # each node's distribution is the one it was drawn from; top_m = 2 leaves the third probability out
    drawn_from = [ROOT, AFTER[A], AFTER[B], AFTER[A], AFTER[C]]
    two = [sorted(p, reverse=True)[:2] for p in drawn_from for _ in range(2)]
    entropy = torch.tensor([-sum(p * math.log(p) for p in pair) for pair in two])
    margin = torch.tensor([math.log(first / second) for first, second in two])
    # float32
    torch.testing.assert_close(stats.entropy[0], entropy, atol=1e-6, rtol=0)
    torch.testing.assert_close(stats.margin[0], margin, atol=1e-6, rtol=0)
    # the distributions after: the root; the root, a; the root, b; the root, a, a; the root, b, c
    ways = [[0], [0, 2], [0, 4], [0, 2, 6], [0, 4, 8]]
    path_entropy = torch.stack([entropy[way].sum() for way in ways for _ in range(2)])
    torch.testing.assert_close(stats.path_entropy[0], path_entropy, atol=1e-6, rtol=0)
    own = torch.tensor([p for pair in two for p in pair[:1]] + [0.0])[:10]
    assert torch.allclose(stats.log_prob[0, ::2].exp(), own[:10:2], atol=1e-6)


def test_shares_among_siblings_are_those_written_by_hand(small) -> None:
    # after the root, a, b, a and c the two most probable words have .8, .9, .9, .9 and .9 together
    first = [0.5 / 0.8, 0.6 / 0.9, 0.7 / 0.9, 0.6 / 0.9, 0.7 / 0.9]
    shares = torch.tensor([share for one in first for share in (one, 1 - one)])
    found = forest_features(small, ("sibling_log_prob",), 1)[0, :, 0]
    torch.testing.assert_close(found.exp(), shares, atol=1e-6, rtol=0)


def test_a_share_among_siblings_is_the_same_in_chains_and_trees(make_traces) -> None:
    """Chains record the first word and the margin alone."""
    traces = make_traces(k=4, layers=3)
    chain, tree = (forest_features(part, ("sibling_log_prob",), 1)[..., 0] for part in (traces.chain, traces.tree))
    assert torch.equal(chain[:, 0], tree[:, 0]) and chain.std() > 0.01
    two = traces.tree.log_prob.unflatten(1, (-1, 4))
    # float32 exponentials of what was rounded to float32 logarithms
    expected = (two - two[..., :2].logsumexp(-1, keepdim=True)).flatten(1).clamp_min(-50)
    torch.testing.assert_close(tree, expected, atol=1e-5, rtol=1e-5)


def test_labels_are_those_written_by_hand(small) -> None:
    accepted = [[path for path, hit in zip(paths_of(small, t), small.accepted[t], strict=True) if hit] for t in (0, 1)]
    assert accepted == [[(A,), (A, B)], [(B,), (B, C), (B, C, A)]]


@pytest.mark.parametrize(("k", "layers", "vocab"), [(1, 5, 6), (2, 1, 6), (3, 4, 6), (6, 3, 6)])
def test_labels_joint_and_expansion_against_brute_force(toy_draft, toy_logits, k, layers, vocab) -> None:
    states = 7
    logits = toy_logits(vocab, 1)
    generator = torch.Generator().manual_seed(k)
    continuation = torch.randint(vocab, (states, layers), generator=generator)
    # half of the states follow the draft for a while, so that deep nodes are accepted too
    chain = grow(toy_draft(states, logits), continuation, TreeShape(1, layers, vocab))
    continuation[::2, : layers - 1] = chain.token_ids[::2, : layers - 1]
    forest = grow(toy_draft(states, logits), continuation, TreeShape(k, layers, vocab))
    for tree in range(states):
        paths = paths_of(forest, tree)
        target = tuple(continuation[tree].tolist())
        assert forest.accepted[tree].tolist() == [path == target[: len(path)] for path in paths]
        joint = [log_joint(logits, tree, path) for path in paths]
        # float32 sums of at most five logarithms
        assert forest.joint_log_prob[tree].tolist() == pytest.approx(joint, abs=1e-5)
        assert expanded(forest, tree) == best_of_each_layer(forest, joint, paths, k, layers)
    assert forest.accepted.any() and not forest.accepted.all()


def log_joint(logits, tree, path) -> float:
    total = 0.0
    for i, token in enumerate(path):
        row = torch.tensor(logits(tree, path[:i]), dtype=torch.float64)
        total += float(row.log_softmax(-1)[token])
    return total


def expanded(forest, tree) -> set[int]:
    return set(forest.parent_ids[tree].tolist()) - {-1}


def best_of_each_layer(forest, joint, paths, k, layers) -> set[int]:
    best: set[int] = set()
    for depth in range(1, layers):
        layer = [node for node, path in enumerate(paths) if len(path) == depth]
        best |= set(sorted(layer, key=lambda node: -joint[node])[:k])
    return best


def test_the_paper_tree_has_1011_nodes_with_its_root(toy_draft, toy_logits) -> None:
    shape = TreeShape()
    assert 1 + node_count(shape.k, shape.layers) == 1 + 10 + 10 * 100 == 1011
    forest = grow(toy_draft(1, toy_logits(12, 0)), torch.zeros(1, 11, dtype=torch.int64), shape)
    assert forest.accepted.shape == (1, 1010)
    assert forest.parent_ids.shape == (1, distribution_count(10, 11)) == (1, 101)
    assert len(set(paths_of(forest, 0))) == 1010


def test_the_chain_is_the_first_child_all_the_way(make_traces) -> None:
    traces = make_traces(k=4, layers=5)
    compared = 0
    for row in range(len(traces)):
        owner, forest = -1, traces.tree
        for depth in range(5):
            found = (forest.parent_ids[row] == owner).nonzero()
            if not len(found):
                # a tree need not expand the end of the greedy chain
                break
            owner = int(found[0]) * forest.k
            assert traces.chain.joint_log_prob[row, depth] == forest.joint_log_prob[row, owner]
            assert traces.chain.accepted[row, depth] == forest.accepted[row, owner]
            compared += 1
    assert compared > 3 * len(traces)


def test_rows_and_join_undo_each_other(make_traces) -> None:
    tree = make_traces().tree
    mask = torch.arange(len(tree)) < 3
    again = join([tree[mask], tree[~mask]])
    assert torch.equal(again.joint_log_prob, tree.joint_log_prob)
    assert torch.equal(again.parent_ids, tree.parent_ids)


def test_tables_of_another_shape_are_refused(make_traces) -> None:
    tree = make_traces(k=2).tree
    with pytest.raises(C2TError, match="joint_log_prob has shape"):
        Forest(
            3,
            tree.layers,
            *(getattr(tree, name) for name in Forest.__dataclass_fields__ if name not in ("k", "layers")),
        )


@pytest.mark.parametrize("name", ["k", "layers", "top_m"])
def test_a_shape_below_one_is_refused(name) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        TreeShape(**{name: 0})
