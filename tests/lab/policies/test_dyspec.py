"""DySpec's constructions: their optimality by enumeration, and that one is the other layer by layer.

Longer than 300 lines because every test enumerates with the same few functions at the top.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.grow import Distributions, Grown, Growth, LogitDistributions, grow_tree
from c2t_plugin.lab.policies.dyspec import DySpec, DySpecGreedy, DySpecThreshold
from c2t_plugin.lab.verify import Chance, Verification, exact_verifications, verify_without_replacement
from c2t_plugin.trees.nodes import ROOT
from tests.support.core import verify_toy as toy
from tests.support.lab.grown import one_tree

VOCAB = 3
D_MAX = 3


class ToyDrafter:
    """A batch of drafts whose logits depend on the prefix; one model per row."""

    def __init__(self, *models: toy.Model) -> None:
        self.models = models
        self.read: list[list[toy.Prefix]] = [[] for _ in models]

    def root(self) -> Distributions:
        return self._after([[()] for _ in self.models])

    def extend(self, token_ids: Tensor, parents: Tensor) -> Distributions:
        for row, read in enumerate(self.read):
            pairs = zip(token_ids[row].tolist(), parents[row].tolist(), strict=True)
            read.extend([(*(read[parent] if parent >= 0 else ()), token) for token, parent in pairs])
        width = token_ids.shape[1]
        return self._after([read[len(read) - width :] for read in self.read])

    def _after(self, prefixes: list[list[toy.Prefix]]) -> Distributions:
        rows = [
            torch.stack([model(prefix) for prefix in row]) for model, row in zip(self.models, prefixes, strict=True)
        ]
        return LogitDistributions(torch.stack(rows).log())


def greedy(max_nodes: int, **options: object) -> DySpecGreedy:
    return DySpecGreedy(max_nodes=max_nodes, **{"temperature": 1.0, "d_max": D_MAX, **options})  # type: ignore[arg-type]


def by_path(grown: Grown, row: int = 0) -> dict[toy.Prefix, float]:
    """Tokens from the root -> score, for the live nodes of one tree."""
    tree, found = grown.tree, {}
    for column in grown.tree.alive[row].nonzero().flatten().tolist():
        path: toy.Prefix = ()
        at = column
        while at != ROOT:
            path = (int(tree.token_ids[row, at]), *path)
            at = int(tree.parent_ids[row, at])
        found[path] = float(tree.scores[row, column])
    return found


def subtrees(size: int, vocab: int, d_max: int) -> Iterator[frozenset[toy.Prefix]]:
    """Every connected tree below the root with this many nodes, by tokens."""
    layer = {frozenset[toy.Prefix]()}
    for _ in range(size):
        layer = {
            tree | {(*parent, token)}
            for tree in layer
            for parent in (*tree, ())
            for token in range(vocab)
            if len(parent) < d_max and (*parent, token) not in tree
        }
    yield from layer


def joint_weight(model: toy.Model, path: toy.Prefix) -> float:
    """Equation 12: the product of the draft probabilities on the path."""
    weight = 1.0
    for place, token in enumerate(path):
        weight *= float(model(path[:place])[token])
    return weight


def reach_weight(model: toy.Model, path: toy.Prefix) -> float:
    """Equation 11 without rho: the path above, times the mass that is left by the siblings taken before."""
    probs = model(path[:-1])
    before = [other for other in range(len(probs)) if probs[other] > probs[path[-1]]]
    return joint_weight(model, path[:-1]) * (1 - float(probs[before].sum()))


def siblings_in_order(model: toy.Model, tree: frozenset[toy.Prefix]) -> bool:
    """Whether every sibling more likely than a node of the tree is in it too: they are taken in this order."""
    return all(
        (*path[:-1], other) in tree
        for path in tree
        for other in range(VOCAB)
        if model(path[:-1])[other] > model(path[:-1])[path[-1]]
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_greedy_is_optimal_in_the_joint_reading(seed: int, size: int) -> None:
    """Appendix D.1: no connected tree of this size has more joint probability."""
    model = toy.model(seed, VOCAB)
    found = by_path(grow_tree(ToyDrafter(model), greedy(size, reading="joint")))
    best = max(sum(joint_weight(model, path) for path in tree) for tree in subtrees(size, VOCAB, D_MAX))
    assert sum(joint_weight(model, path) for path in found) == pytest.approx(best, rel=1e-12)
    assert sum(found.values()) == pytest.approx(best, rel=1e-6)  # float32 scores


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_greedy_is_optimal_in_the_reach_reading(seed: int, size: int) -> None:
    """Appendix D: no tree whose siblings are taken most likely first reaches more samplings (equation 11)."""
    model = toy.model(seed, VOCAB)
    found = by_path(grow_tree(ToyDrafter(model), greedy(size)))
    trees = [tree for tree in subtrees(size, VOCAB, D_MAX) if siblings_in_order(model, tree)]
    best = max(sum(reach_weight(model, path) for path in tree) for tree in trees)
    assert sum(reach_weight(model, path) for path in found) == pytest.approx(best, rel=1e-12)
    assert sum(found.values()) == pytest.approx(best, rel=1e-6)  # float32 scores


def test_the_two_readings_differ() -> None:
    """With .45 and three times about .18 the second sampling at the root is reached more often (.55) than one below the
    first word (.45), but its word (.19) is less likely than two times the first (.2025)."""
    drafter = ToyDrafter(lambda prefix: torch.tensor([0.45, 0.19, 0.18, 0.18], dtype=torch.float64))
    assert by_path(grow_tree(drafter, greedy(2))) == pytest.approx({(0,): 1.0, (1,): 0.55})
    assert by_path(grow_tree(drafter, greedy(2, reading="joint"))) == pytest.approx({(0,): 0.45, (0, 0): 0.2025})


class Fixed:
    """Draws that depend on the distribution only, so that two orders of construction draw the same."""

    def accepts(self, ratio: float) -> bool:
        raise AssertionError("drafting accepts nothing")

    def draw(self, probs: Tensor) -> int:
        point = float((probs * torch.arange(1, len(probs) + 1)).sum() * 997) % 1
        return min(int((probs.cumsum(0) <= point).sum()), int(probs.nonzero()[-1]))


class FixedGreedy(DySpecGreedy):
    def chance(self, growth: Growth) -> Chance:
        return Fixed()


class FixedThreshold(DySpecThreshold):
    def chance(self, growth: Growth) -> Chance:
        return Fixed()


@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize("kind", ["reach", "joint", "sampled"])
def test_threshold_at_the_last_value_gives_the_greedy_tree(size: int, kind: str) -> None:
    models = [toy.model(seed, 5) for seed in (1, 2, 3)]
    options = {"sampled": True} if kind == "sampled" else {"reading": kind}
    greedy_class, threshold_class = (
        (FixedGreedy, FixedThreshold) if kind == "sampled" else (DySpecGreedy, DySpecThreshold)
    )
    by_size = grow_tree(ToyDrafter(*models), greedy_class(max_nodes=size, temperature=0.7, **options))
    for row, model in enumerate(models):
        last = float(by_size.tree.scores[row][by_size.tree.alive[row]].min())
        # scores are float32, values float64: just below, so that the last node itself is not lost to rounding
        policy = threshold_class(threshold=last * (1 - 1e-6), temperature=0.7, **options)
        by_layer = grow_tree(ToyDrafter(model), policy)
        assert by_path(by_layer) == pytest.approx(by_path(by_size, row), rel=1e-6)
        layers = int(by_layer.tree.depths[by_layer.tree.alive].max())
        # the joint reading may draft from a last layer to find that none of its words is likely enough
        assert int(by_layer.passes[0]) in ((layers, layers + 1) if kind == "joint" else (layers,))


def test_the_printed_threshold_would_keep_the_other_side() -> None:
    """Algorithm 2 prints `while v < t`; every node has a value of at least t here."""
    grown = grow_tree(ToyDrafter(toy.model(4)), DySpecThreshold(threshold=0.2, temperature=1.0))
    values = by_path(grown)
    assert len(values) > 1
    assert min(values.values()) >= 0.2


def test_values_only_fall() -> None:
    """Appendix A.1: the greedy construction adds nodes in the order of their value."""
    grown = grow_tree(
        ToyDrafter(toy.model(5, 4)), greedy(20, sampled=True, d_max=None), torch.Generator().manual_seed(0)
    )
    scores = grown.tree.compact().scores[0]
    assert len(scores) == 20
    assert (scores.diff() <= 0).all()


def test_rows_do_not_know_each_other() -> None:
    models = [toy.model(seed, 4) for seed in (6, 7, 8)]
    together = grow_tree(ToyDrafter(*models), greedy(9))
    together.tree.validate()
    alone = [grow_tree(ToyDrafter(model), greedy(9)) for model in models]
    assert [by_path(together, row) for row in range(3)] == [by_path(one) for one in alone]
    assert together.passes.tolist() == [int(one.passes[0]) for one in alone]


def test_node_fields_are_those_of_the_draft_at_its_temperature() -> None:
    model = toy.model(9, 4)
    grown = grow_tree(ToyDrafter(model), greedy(8, temperature=0.5))
    tree = grown.tree.compact().validate()
    paths = list(by_path(grown))
    for column, path in enumerate(paths):
        probs = model(path[:-1]) ** 2 / (model(path[:-1]) ** 2).sum()
        ordered = probs.sort(descending=True)
        joint = sum(float((model(path[:p]) ** 2 / (model(path[:p]) ** 2).sum())[t].log()) for p, t in enumerate(path))
        assert tree.log_probs[0, column] == pytest.approx(float(probs[path[-1]].log()), rel=1e-5)
        assert tree.joint_log_probs[0, column] == pytest.approx(joint, rel=1e-5)
        assert tree.entropy[0, column] == pytest.approx(float(-(probs * probs.log()).sum()), rel=1e-5)
        assert tree.margin[0, column] == pytest.approx(float((ordered.values[0] / ordered.values[1]).log()), rel=1e-4)
        assert tree.rank[0, column] == ordered.indices.tolist().index(path[-1])
        assert tree.depths[0, column] == len(path)


@pytest.mark.parametrize(
    "policy",
    [
        DySpecGreedy(max_nodes=3, temperature=0.9, sampled=True, d_max=2),
        DySpecThreshold(threshold=0.35, temperature=0.9, sampled=True, d_max=2),
        DySpecGreedy(max_nodes=3, temperature=0.9, sampled=True, d_max=2, max_children=2),
        DySpecThreshold(threshold=0.2, temperature=0.9, sampled=True, d_max=2, max_nodes=2),
    ],
    ids=["greedy", "threshold", "greedy, 2 children", "threshold, cut off"],
)
def test_sampled_construction_and_verification_are_exact(policy: DySpec) -> None:
    """The policies themselves under exact enumeration, with algorithm 3."""
    draft, target = toy.model(3), toy.model(87)
    grown: dict[tuple[toy.Prefix, toy.Prefix], Tensor] = {}
    assert Verification.WITHOUT_REPLACEMENT in exact_verifications(policy.drafting)

    def make(chance: Chance) -> toy.DraftTree:
        class Enumerated(type(policy)):  # type: ignore[misc]
            def chance(self, growth: Growth) -> Chance:
                return chance

        drawn = grow_tree(ToyDrafter(draft), Enumerated(**vars(policy)))
        tree, draft_probs = one_tree(drawn, 0, policy.temperature, Verification.WITHOUT_REPLACEMENT)
        grown[tuple(tree.token_ids.tolist()), tuple(tree.parent_ids.tolist())] = draft_probs
        return tree

    def verifier(tree: toy.DraftTree) -> object:
        draft_probs = grown[tuple(tree.token_ids.tolist()), tuple(tree.parent_ids.tolist())]
        target_probs = toy.rows_of(target, tree)
        return lambda chance: verify_without_replacement(tree, draft_probs, target_probs, chance)

    assert toy.error_of(make, verifier, target, 2) < 1e-9  # type: ignore[arg-type]
    assert len(grown) > 5


def test_temperature_0_gives_a_chain_of_the_most_likely_words() -> None:
    @cache
    def tied(prefix: toy.Prefix) -> Tensor:
        return torch.tensor([0.2, 0.4, 0.4], dtype=torch.float64)

    for sampled in (False, True):
        grown = grow_tree(
            ToyDrafter(tied), greedy(5, temperature=0.0, sampled=sampled), torch.Generator().manual_seed(1)
        )
        assert list(by_path(grown)) == [(1,), (1, 1), (1, 1, 1)]  # d_max ends it; the draft has no second word


def test_words_without_probability_and_rows_without_a_distribution() -> None:
    gap = toy.model(1, 3, zero=0)
    nothing = torch.full((3,), torch.nan, dtype=torch.float64)
    grown = grow_tree(ToyDrafter(gap, lambda prefix: nothing), greedy(40))
    grown.tree.validate()
    assert grown.tree.sizes().tolist() == [2 + 4 + 8, 0]
    assert not any(0 in path for path in by_path(grown))


def test_leaves_are_not_drafted_from() -> None:
    """One pass per node that was the best position when its turn came, the root's included."""
    grown = grow_tree(ToyDrafter(toy.model(2, 4)), greedy(10))
    inner = {path[:-1] for path in by_path(grown)}
    assert int(grown.passes[0]) == len(inner)


def test_same_seed_same_tree() -> None:
    trees = [
        grow_tree(ToyDrafter(toy.model(2, 4)), greedy(10, sampled=True), torch.Generator().manual_seed(seed))
        for seed in (4, 4, 5)
    ]
    assert by_path(trees[0]) == by_path(trees[1])
    assert by_path(trees[0]) != by_path(trees[2])


class StatisticsOnly(ToyDrafter):
    """A record: probabilities of the most probable words, no logits."""

    def _after(self, prefixes: list[list[toy.Prefix]]) -> Distributions:
        return NoLogits(super()._after(prefixes).logits())


class NoLogits(LogitDistributions):
    def logits(self) -> Tensor:
        raise AssertionError("only statistics are known")


@pytest.mark.parametrize("reading", ["reach", "joint"])
@pytest.mark.parametrize("make", [greedy, lambda size, **options: DySpecThreshold(threshold=1 / size, **options)])
def test_statistics_are_enough_for_limited_siblings(make: object, reading: str) -> None:
    """Temperature 1: the same tree from k probabilities as from all of them, where k siblings are enough."""
    options = {"temperature": 1.0, "d_max": 3, "reading": reading}
    model = toy.model(12, 6)
    whole = by_path(grow_tree(ToyDrafter(model), make(12, **options)))  # type: ignore[operator]
    widest = max(sum(path[:-1] == other[:-1] for other in whole) for path in whole)
    assert widest < 6
    record = make(12, **options, max_children=widest)  # type: ignore[operator]
    assert by_path(grow_tree(StatisticsOnly(model), record)) == pytest.approx(whole, rel=1e-5)
    narrow = make(12, **options, max_children=1)  # type: ignore[operator]
    chain = by_path(grow_tree(StatisticsOnly(model), narrow))
    assert [len(path) for path in chain] == list(range(1, len(chain) + 1))


@pytest.mark.parametrize("cut", range(9))
def test_one_tree_leaves_out_dead_nodes_and_other_rows(cut: int) -> None:
    """Columns move, parents with them, and each row of draft_probs is what the children were drawn from."""
    models = (toy.model(2, 4), toy.model(3, 4))
    grown = grow_tree(ToyDrafter(*models), greedy(10, temperature=0.5))
    kept = torch.ones_like(grown.tree.alive)
    kept[0, cut] = False
    pruned = replace(grown, tree=grown.tree.keep(grown.tree.closed(kept)))
    tree, draft_probs = one_tree(pruned, 0, 0.5, Verification.TARGET_ONLY)
    prefixes = toy.prefixes(tree)
    assert set(prefixes[1:]) == set(by_path(pruned))
    for node, prefix in enumerate(prefixes, start=ROOT):
        expected = models[0](prefix) ** 2 / (models[0](prefix) ** 2).sum()
        assert torch.allclose(draft_probs[node + 1], expected * bool(tree.children(node)))


@pytest.mark.parametrize("verification", list(Verification))
@pytest.mark.parametrize("sampled", [False, True])
def test_one_tree_is_handed_to_an_exact_verification_only(sampled: bool, verification: Verification) -> None:
    grown = grow_tree(
        ToyDrafter(toy.model(2, 4)),
        greedy(4, temperature=0.5, sampled=sampled),
        torch.Generator().manual_seed(0),
    )
    if verification in exact_verifications(grown.drafting):
        assert len(one_tree(grown, 0, 0.5, verification)[0]) == 4
        return
    with pytest.raises(ConfigError, match=f"{verification.value} is not exact"):
        one_tree(grown, 0, 0.5, verification)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DySpecGreedy(max_nodes=0), "max_nodes"),
        (lambda: DySpecGreedy(max_nodes=4, temperature=-1.0), "temperature"),
        (lambda: DySpecGreedy(max_nodes=4, d_max=0), "d_max"),
        (lambda: DySpecGreedy(max_nodes=4, reading="both"), "reading"),
        (lambda: DySpecGreedy(max_nodes=4, reading="joint", sampled=True), "looks at the token drawn"),
        (lambda: DySpecGreedy(max_nodes=4, max_children=0), "max_children"),
        (lambda: DySpecThreshold(threshold=0.0), "threshold"),
        (lambda: DySpecThreshold(threshold=1.5), "threshold"),
        (lambda: DySpecThreshold(threshold=0.1, max_nodes=0), "max_nodes"),
        (lambda: grow_tree(ToyDrafter(toy.model(1)), greedy(3, sampled=True)), "generator"),
    ],
)
def test_wrong_options_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_enumeration_of_trees_is_complete() -> None:
    """Binary trees with 3 nodes below the root: counted by hand."""
    assert len(set(subtrees(1, 2, 3))) == 2
    assert len(set(subtrees(2, 2, 3))) == 1 + 4
    assert all(len(tree) == 3 for tree in itertools.islice(subtrees(3, 2, 3), 50))
