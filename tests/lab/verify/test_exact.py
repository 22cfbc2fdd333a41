"""Every verification against exact enumeration: all draws of the draft, all decisions of the verification.

The code under test is the code that samples; only its source of randomness is replaced. 1e-9 is room for float64 sums.
Longer than 300 lines because all verifications are enumerated by one harness.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.lab.verify import (
    ROOT,
    Chance,
    Drafting,
    DraftTree,
    Draw,
    Pruning,
    Replay,
    Sampler,
    Verification,
    Verified,
    compatible,
    exact_verifications,
    outcomes,
)
from c2t_plugin.lab.verify import rejection as rejection_module
from c2t_plugin.lab.verify import target_only as target_only_module
from tests.support.core import verify_toy as toy

pytestmark = pytest.mark.slow

EXACT = 1e-9
# A forbidden combination must be wrong by more than rounding; those tested here are wrong by .0098 to .12.
WRONG = 1e-4
COMBINATIONS = list(itertools.product(Draw, Pruning, Verification))
NATURAL = {
    Verification.CHAIN: Draw.INDEPENDENT,
    Verification.MULTI_ROUND: Draw.INDEPENDENT,
    Verification.WITHOUT_REPLACEMENT: Draw.WITHOUT_REPLACEMENT,
    Verification.K_SEQ: Draw.INDEPENDENT,
    Verification.TARGET_ONLY: Draw.TOP_K,
    Verification.GREEDY: Draw.TOP_K,
}


REJECTIONS = [v for v in Verification if v not in (Verification.GREEDY, Verification.TARGET_ONLY)]


def widths(verification: Verification) -> tuple[int, ...]:
    return (1, 1) if verification is Verification.CHAIN else (2, 1)


def siblings(verification: Verification) -> tuple[int, ...]:
    """One layer, enough to show a fault."""
    return (1,) if verification is Verification.CHAIN else (2,)


def error(
    draw: Draw,
    pruning: Pruning,
    verification: Verification,
    draft: toy.Model,
    target: toy.Model,
    shape: tuple[int, ...] | None = None,
) -> float:
    shape = shape or widths(verification)
    return toy.error_of(
        lambda chance: toy.grow(draft, draw, pruning, chance, shape),
        toy.verifier(verification, draft, target),
        target,
        len(shape),
    )


@pytest.mark.parametrize(("draw", "pruning", "verification"), COMBINATIONS)
def test_what_is_allowed_is_exact_and_what_is_forbidden_is_not(
    draw: Draw, pruning: Pruning, verification: Verification
) -> None:
    draft, target = toy.model(3), toy.model(87)
    target = toy.one_hot(target) if verification is Verification.GREEDY else target
    if verification in exact_verifications(Drafting(draw, pruning)):
        compatible(Drafting(draw, pruning), verification)
        assert error(draw, pruning, verification, draft, target) < EXACT
        return
    with pytest.raises(ConfigError, match=verification.value):
        compatible(Drafting(draw, pruning), verification)
    try:
        assert error(draw, pruning, verification, toy.DRAFT, toy.TARGET, siblings(verification)) > WRONG
    except C2TError as impossible:
        assert "draft probability 0" in str(impossible)


@pytest.mark.parametrize("verification", list(Verification))
@pytest.mark.parametrize(
    ("draft_kind", "target_kind"),
    [("cold", "warm"), ("warm", "cold"), ("cold", "cold"), ("same", "same"), ("disjoint", "disjoint"), ("gap", "warm")],
)
def test_edges_stay_exact(verification: Verification, draft_kind: str, target_kind: str) -> None:
    """Temperature 0 on either side, D == T, no common word, a word that the draft lacks."""
    kinds = {
        "warm": (toy.model(3), toy.model(4)),
        "cold": (toy.one_hot(toy.model(3)), toy.one_hot(toy.model(4))),
        "same": (toy.model(3), toy.model(3)),
        "disjoint": (
            lambda prefix: torch.tensor([0.7, 0.3, 0.0, 0.0], dtype=torch.float64),
            lambda prefix: torch.tensor([0.0, 0.0, 0.2, 0.8], dtype=torch.float64),
        ),
        "gap": (toy.model(3, zero=1), toy.model(4)),
    }
    draft, target = kinds[draft_kind][0], kinds[target_kind][1]
    target = toy.one_hot(target) if verification is Verification.GREEDY else target
    pruning = Pruning.BEFORE_SIBLINGS
    assert error(NATURAL[verification], pruning, verification, draft, target) < EXACT


@pytest.mark.parametrize("verification", list(Verification))
@pytest.mark.parametrize(("shape", "vocab"), [((3,), 4), ((3, 1), 2), ((2, 2), 2)])
def test_every_shape_stays_exact(verification: Verification, shape: tuple[int, ...], vocab: int) -> None:
    """More siblings, SpecTr's k sequences (branches at the root only), siblings in both layers."""
    if verification is Verification.CHAIN:
        shape = (1, 1, 1)
    draft, target = toy.model(5, vocab), toy.model(6, vocab)
    target = toy.one_hot(target) if verification is Verification.GREEDY else target
    assert _plain(NATURAL[verification], verification, draft, target, shape) < EXACT


def _plain(
    draw: Draw, verification: Verification, draft: toy.Model, target: toy.Model, shape: tuple[int, ...]
) -> float:
    """As `error`, with all siblings that there can be: nothing is pruned."""

    def make(chance: Chance) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        layer: list[tuple[int, toy.Prefix]] = [(ROOT, ())]
        for width in shape:
            below: list[tuple[int, toy.Prefix]] = []
            for node, prefix in layer:
                left = draft(prefix).clone()
                for _ in range(width):
                    if not left.sum() > 0:
                        break
                    token = int(left.argmax()) if draw is Draw.TOP_K else chance.draw(left / left.sum())
                    left[token] *= draw is Draw.INDEPENDENT
                    tokens.append(token)
                    parents.append(node)
                    below.append((len(tokens) - 1, (*prefix, token)))
            layer = below
        return DraftTree(torch.tensor(tokens), torch.tensor(parents))

    return toy.error_of(make, toy.verifier(verification, draft, target), target, len(shape))


def test_merged_draws_count_as_drawn_without_replacement() -> None:
    """Independent draws with repeats thrown away: exact for the residual verification, not for the multi-round one.

    Whether another try gives a new token depends on the tokens before, not on which new one it is.
    """
    draft, target = toy.DRAFT, toy.TARGET

    def make(chance: Chance) -> DraftTree:
        drawn = [chance.draw(draft(())) for _ in range(3)]
        distinct = list(dict.fromkeys(drawn))
        return DraftTree(torch.tensor(distinct), torch.full((len(distinct),), ROOT))

    def result(verification: Verification) -> float:
        return toy.error_of(make, toy.verifier(verification, draft, target), target, 1)

    assert result(Verification.WITHOUT_REPLACEMENT) < EXACT
    assert result(Verification.MULTI_ROUND) > WRONG


def test_siblings_out_of_order_are_not_exact() -> None:
    """Node orders for attention (heavy path first) must not change the order that siblings are verified in."""
    draft, target = toy.DRAFT, toy.TARGET

    def result(reverse: bool) -> float:
        def make(chance: Chance) -> DraftTree:
            tree = toy.grow(draft, Draw.WITHOUT_REPLACEMENT, Pruning.BEFORE_DRAW, chance, (2,))
            return DraftTree(tree.token_ids.flip(0), tree.parent_ids) if reverse else tree

        return toy.error_of(
            make,
            toy.verifier(Verification.WITHOUT_REPLACEMENT, draft, target),
            target,
            1,
        )

    assert result(reverse=False) < EXACT
    assert result(reverse=True) > WRONG


def planted_error(verification: Verification) -> float:
    """What a planted fault does to the natural drafting of a verification, which is exact without it."""
    draw, shape = NATURAL[verification], siblings(verification)
    return error(draw, Pruning.BEFORE_SIBLINGS, verification, toy.DRAFT, toy.TARGET, shape)


def test_nothing_planted_is_exact() -> None:
    assert all(planted_error(verification) < EXACT for verification in REJECTIONS)


class NormalCoin(Replay):
    """DySpec's algorithm 3 as printed: c ~ N(0, 1), accepted where c <= ratio."""

    def accepts(self, ratio: float) -> bool:
        below = (1 + math.erf(ratio / math.sqrt(2))) / 2
        return self._choose([1 - below, below]) == 1


@pytest.mark.parametrize("verification", REJECTIONS)
def test_planted_normal_coin_is_caught(verification: Verification, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("c2t_plugin.lab.verify.chance.Replay", NormalCoin)
    assert (
        error(
            NATURAL[verification], Pruning.BEFORE_SIBLINGS, verification, toy.DRAFT, toy.TARGET, siblings(verification)
        )
        > WRONG
    )


@pytest.mark.parametrize("verification", [v for v in REJECTIONS if v is not Verification.K_SEQ])
def test_planted_target_instead_of_residual_is_caught(
    verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection_module, "residual", lambda target, draft: target)
    assert (
        error(
            NATURAL[verification], Pruning.BEFORE_SIBLINGS, verification, toy.DRAFT, toy.TARGET, siblings(verification)
        )
        > WRONG
    )


@pytest.mark.parametrize("verification", [Verification.MULTI_ROUND, Verification.WITHOUT_REPLACEMENT])
def test_planted_residual_that_is_not_renormalised_is_caught(
    verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_as_it_is(target: Tensor, draft: Tensor) -> Tensor:
        left = (target - draft).clamp_min(0)
        return left if left.sum() > 0 else target

    class Renormalising(Replay):
        def draw(self, probs: Tensor) -> int:
            return super().draw(probs / probs.sum())

    monkeypatch.setattr(rejection_module, "residual", left_as_it_is)
    # the final draw normalises by itself, as torch.multinomial does: the fault is in the ratios only
    monkeypatch.setattr("c2t_plugin.lab.verify.chance.Replay", Renormalising)
    assert (
        error(
            NATURAL[verification], Pruning.BEFORE_SIBLINGS, verification, toy.DRAFT, toy.TARGET, siblings(verification)
        )
        > WRONG
    )


def test_planted_draft_that_is_not_renormalised_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_module, "normalise", lambda weights: weights)
    assert planted_error(Verification.WITHOUT_REPLACEMENT) > WRONG


class Sharpened(Replay):
    """Draws from the squares."""

    def draw(self, probs: Tensor) -> int:
        return super().draw(probs**2 / (probs**2).sum())


def test_planted_sharper_draw_is_caught_without_draft_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planted_error(Verification.TARGET_ONLY) < EXACT
    monkeypatch.setattr("c2t_plugin.lab.verify.chance.Replay", Sharpened)
    assert planted_error(Verification.TARGET_ONLY) > WRONG


@pytest.mark.parametrize("verification", [Verification.GREEDY, Verification.TARGET_ONLY])
def test_planted_favour_for_what_was_drafted_is_caught(
    verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root's first child is twice as likely to be accepted, or accepted at once by a greedy target."""
    right = target_only_module._walk

    def favouring(tree: DraftTree, target_probs: Tensor, choose: Callable[[Tensor], int]) -> Verified:
        favoured = target_probs.clone()
        favoured[0, tree.token(0)] += favoured[0, tree.token(0)] if verification is Verification.TARGET_ONLY else 2
        favoured[0] /= favoured[0].sum()
        return right(tree, favoured, choose)

    target = toy.one_hot(toy.TARGET) if verification is Verification.GREEDY else toy.TARGET

    def found() -> float:
        return error(Draw.TOP_K, Pruning.BEFORE_SIBLINGS, verification, toy.DRAFT, target, (2,))

    assert found() < EXACT
    monkeypatch.setattr(target_only_module, "_walk", favouring)
    assert found() > WRONG


SAMPLES = 2000
# Five chi-square tests with fixed seeds: a right verification passes at this level, the planted bias is far below it.
LEVEL = 1e-3


def sampled_p_value(verification: Verification, pruning: Pruning) -> float:
    """Chi-square of sampled outputs, drafting and verifying from one torch.Generator, against the target's joint."""
    draft, target = toy.model(11), toy.model(12)
    chance = Sampler(torch.Generator().manual_seed(5))
    verifier = toy.verifier(verification, draft, target)
    expected = toy.joint(target, 3)
    counts = dict.fromkeys(expected, 0)
    for _ in range(SAMPLES):
        tree = toy.grow(draft, NATURAL[verification], pruning, chance, widths(verification))
        tokens = list(verifier(tree)(chance).tokens)
        while len(tokens) < 3:
            tokens.append(chance.draw(target(tuple(tokens))))
        counts[tuple(tokens)] += 1
    return float(chisquare(list(counts.values()), [SAMPLES * weight for weight in expected.values()]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("verification", [v for v in Verification if v is not Verification.GREEDY])
def test_sampled_output_follows_the_target(verification: Verification) -> None:
    assert sampled_p_value(verification, Pruning.BEFORE_SIBLINGS) > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("verification", REJECTIONS)
def test_sampled_output_shows_a_cut_by_own_draw(verification: Verification) -> None:
    assert sampled_p_value(verification, Pruning.OWN_DRAW) < LEVEL


def test_enumeration_gives_every_path_once() -> None:
    def run(chance: Chance) -> tuple[int, ...]:
        first = chance.draw(torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64))
        return (
            (first, chance.draw(torch.tensor([0.25, 0.75], dtype=torch.float64))) if chance.accepts(0.5) else (first,)
        )

    assert outcomes(run) == pytest.approx(
        {(0,): 0.25, (2,): 0.25, (0, 0): 0.0625, (0, 1): 0.1875, (2, 0): 0.0625, (2, 1): 0.1875}
    )
