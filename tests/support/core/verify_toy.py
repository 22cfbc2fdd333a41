"""A draft and a target over a tiny vocabulary, trees drawn from the draft, and the exact output of a verification."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from c2t_plugin.lab.verify import (
    ROOT,
    Chance,
    DraftTree,
    Draw,
    Pruning,
    Verification,
    Verified,
    outcomes,
    verify_chain,
    verify_greedy,
    verify_k_seq,
    verify_multi_round,
    verify_target_only,
    verify_without_replacement,
)

Prefix = tuple[int, ...]
Model = Callable[[Prefix], Tensor]
WITH_DRAFT = {
    Verification.CHAIN: verify_chain,
    Verification.MULTI_ROUND: verify_multi_round,
    Verification.WITHOUT_REPLACEMENT: verify_without_replacement,
    Verification.K_SEQ: verify_k_seq,
}


def model(seed: int, vocab: int = 3, zero: int | None = None) -> Model:
    """Conditional distributions that depend on the prefix, float64; word `zero` never occurs."""

    @cache
    def probs(prefix: Prefix) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1009 + sum((w + 1) * 31**i for i, w in enumerate(prefix)))
        weights = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2 + 0.05
        if zero is not None:
            weights[zero] = 0
        return weights / weights.sum()

    return probs


def turned(*weights: float) -> Model:
    """The same distribution after every prefix, turned by the prefix's tokens."""
    return lambda prefix: torch.tensor(weights, dtype=torch.float64).roll(sum(prefix) + len(prefix))


# Two words that the target likes better than the draft, two that it likes less, one of these likely: with fewer a wrong
# residual, or a number of siblings that depends on a draw, can be right by luck.
DRAFT, TARGET = turned(0.45, 0.25, 0.2, 0.1), turned(0.2, 0.1, 0.3, 0.4)


def one_hot(inner: Model) -> Model:
    """The model at temperature 0."""
    return lambda prefix: torch.nn.functional.one_hot(inner(prefix).argmax(), len(inner(prefix))).double()


def joint(target: Model, length: int) -> dict[Prefix, float]:
    """The target's own distribution of the next `length` tokens."""
    vocab = len(target(()))
    weights = {}
    for tokens in itertools.product(range(vocab), repeat=length):
        weight = 1.0
        for place, token in enumerate(tokens):
            weight *= float(target(tokens[:place])[token])
        weights[tokens] = weight
    return weights


def completed(steps: dict[Prefix, float], target: Model, length: int) -> dict[Prefix, float]:
    """Distribution of `length` tokens: what the steps gave, continued by sampling the target."""
    found = dict.fromkeys(itertools.product(range(len(target(()))), repeat=length), 0.0)
    for tokens, weight in steps.items():
        for whole in found:
            if whole[: len(tokens)] == tokens:
                rest = weight
                for place in range(len(tokens), length):
                    rest *= float(target(whole[:place])[whole[place]])
                found[whole] += rest
    return found


def distance(found: dict[Prefix, float], expected: dict[Prefix, float]) -> float:
    """The largest difference of two distributions on the same outcomes."""
    assert found.keys() == expected.keys()
    return max(abs(found[key] - expected[key]) for key in expected)


def prefixes(tree: DraftTree) -> list[Prefix]:
    """Tokens from the root, for the root and then every node."""
    return [(), *(tuple(tree.token(node) for node in tree.path(column)) for column in range(len(tree)))]


def rows_of(source: Model, tree: DraftTree) -> Tensor:
    return torch.stack([source(prefix) for prefix in prefixes(tree)])


def two_or_one(probs: Tensor) -> int:
    """A number of siblings that depends on the distribution only."""
    return 2 if probs.max() < 0.6 else 1


def siblings(probs: Tensor, draw: Draw, pruning: Pruning, width: int, chance: Chance) -> list[int]:
    """Tokens of one node's children; each pruning rule is a plain example of its kind."""
    count = min(width, two_or_one(probs)) if pruning is Pruning.BEFORE_SIBLINGS else width
    tokens: list[int] = []
    left = probs.clone()
    while len(tokens) < count and left.sum() > 0:
        token = int(left.argmax()) if draw is Draw.TOP_K else chance.draw(left / left.sum())
        tokens.append(token)
        if draw is not Draw.INDEPENDENT:
            left[token] = 0
        # the siblings before decide whether there is another
        if pruning is Pruning.BEFORE_DRAW and probs[token] < 0.4:
            break
    return [token for token in tokens if pruning is not Pruning.OWN_DRAW or probs[token] > 0.3]


def grow(draft: Model, draw: Draw, pruning: Pruning, chance: Chance, widths: tuple[int, ...]) -> DraftTree:
    """A tree with at most widths[d] children at depth d, breadth first."""
    tokens: list[int] = []
    parents: list[int] = []
    waiting: deque[tuple[int, Prefix]] = deque([(ROOT, ())])
    while waiting:
        node, prefix = waiting.popleft()
        if len(prefix) == len(widths):
            continue
        for token in siblings(draft(prefix), draw, pruning, widths[len(prefix)], chance):
            tokens.append(token)
            parents.append(node)
            waiting.append((len(tokens) - 1, (*prefix, token)))
    return DraftTree(torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64))


Verifier = Callable[[DraftTree], Callable[[Chance], Verified]]


def verifier(verification: Verification, draft: Model, target: Model) -> Verifier:
    """tree -> the verification of that tree, which only lacks a source of chance."""

    def for_tree(tree: DraftTree) -> Callable[[Chance], Verified]:
        draft_probs, target_probs = rows_of(draft, tree), rows_of(target, tree)
        if verification is Verification.GREEDY:
            return lambda chance: verify_greedy(tree, target_probs)
        if verification is Verification.TARGET_ONLY:
            return lambda chance: verify_target_only(tree, target_probs, chance)
        return lambda chance: WITH_DRAFT[verification](tree, draft_probs, target_probs, chance)

    return for_tree


def error_of(make: Callable[[Chance], DraftTree], verifier: Verifier, target: Model, depth: int) -> float:
    """How far drafting and verifying is from the target's own joint distribution, by exact enumeration.

    The two share no randomness, so trees are enumerated first and each is verified in every way once.
    """

    def drawn(chance: Chance) -> tuple[Prefix, Prefix]:
        tree = make(chance)
        return tuple(tree.token_ids.tolist()), tuple(tree.parent_ids.tolist())

    found: dict[Prefix, float] = {}
    for fields, weight in outcomes(drawn).items():
        tree = DraftTree(*(torch.tensor(values, dtype=torch.int64) for values in fields))
        check = verifier(tree)
        for tokens, share in outcomes(lambda chance: check(chance).tokens).items():  # noqa: B023
            found[tokens] = found.get(tokens, 0.0) + weight * share
    return distance(completed(found, target, depth + 1), joint(target, depth + 1))
