"""Verification by hand-worked steps: replayed decisions, edges, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.lab.verify import (
    ROOT,
    Drafting,
    DraftTree,
    Draw,
    Pruning,
    Replay,
    Sampler,
    Verification,
    Verified,
    compatible,
    division_factor,
    exact_verifications,
    outcomes,
    probabilities,
    residual,
    verify_chain,
    verify_greedy,
    verify_k_seq,
    verify_multi_round,
    verify_target_only,
    verify_without_replacement,
)
from c2t_plugin.lab.verify.k_seq import overlap, select
from tests.support.core import verify_toy as toy

REJECTING = [verify_chain, verify_multi_round, verify_without_replacement, verify_k_seq]
ACCEPT, REJECT = 1, 0


def probs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def tree(tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64))


# root -> 1, 2; 1 -> 0; 2 -> 2
FORK = tree([1, 2, 0, 2], [ROOT, ROOT, 0, 1])


def test_greedy_walks_while_a_child_is_the_argmax() -> None:
    logits = probs([0.0, 1.0, 5.0], [9.0, 0.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0], [2.0, 7.0, 0.0])
    assert verify_greedy(FORK, logits) == Verified(nodes=(1, 3), bonus=1, tokens=(2, 2, 1))


def test_greedy_ties_go_to_the_lower_token() -> None:
    assert verify_greedy(tree([1], [ROOT]), probs([0.0, 2.0, 2.0], [4.0, 1.0, 4.0])).tokens == (1, 0)


def test_target_only_samples_and_walks() -> None:
    rows = probs([0.2, 0.5, 0.3], [0.9, 0.1, 0.0], [0.3, 0.3, 0.4], [0.5, 0.5, 0.0], [0.1, 0.1, 0.8])
    assert verify_target_only(FORK, rows, Replay((1, 0, 1))) == Verified((0, 2), 1, (1, 0, 1))
    assert verify_target_only(FORK, rows, Replay((0,))) == Verified((), 0, (0,))


def test_chain_rejection_samples_the_residual() -> None:
    """D = (.6, .4, 0), T = (.2, .3, .5): token 0 has ratio 1/3, and only token 2 is left after its rejection."""
    chain, draft = tree([0], [ROOT]), probs([0.6, 0.4, 0.0], [0.0, 0.0, 0.0])
    target = probs([0.2, 0.3, 0.5], [0.1, 0.1, 0.8])
    found = outcomes(lambda chance: verify_chain(chain, draft, target, chance))
    third = pytest.approx(1 / 3)
    assert found.pop(Verified((), 2, (2,))) == pytest.approx(2 / 3)
    assert sum(found.values()) == third
    assert found[Verified((0,), 2, (0, 2))] == pytest.approx(0.8 / 3)


def test_algorithm_3_takes_the_rejected_token_out_of_the_draft() -> None:
    """D = (.5, .3, .2), T = (.1, .4, .5). After token 0: R = (0, .25, .75), D = (0, .6, .4): token 1 has ratio 5/12."""
    two = tree([0, 1], [ROOT, ROOT])
    draft, target = probs([0.5, 0.3, 0.2], [0.0] * 3, [0.0] * 3), probs([0.1, 0.4, 0.5], [1.0, 0, 0], [1.0, 0, 0])
    found = outcomes(lambda chance: verify_without_replacement(two, draft, target, chance))
    assert found == pytest.approx(
        {
            Verified((0,), 0, (0, 0)): 0.2,
            Verified((1,), 0, (1, 0)): 0.8 * 5 / 12,
            Verified((), 2, (2,)): 0.8 * 7 / 12,
        }
    )


def test_multi_round_keeps_the_draft() -> None:
    """As above with D = (.5, .3, .2) again for token 1: ratio .25 / .3."""
    two = tree([0, 1], [ROOT, ROOT])
    draft, target = probs([0.5, 0.3, 0.2], [0.0] * 3, [0.0] * 3), probs([0.1, 0.4, 0.5], [1.0, 0, 0], [1.0, 0, 0])
    found = outcomes(lambda chance: verify_multi_round(two, draft, target, chance))
    assert found[Verified((1,), 0, (1, 0))] == pytest.approx(0.8 * 0.25 / 0.3)


def test_a_leaf_brings_a_bonus_token() -> None:
    """Algorithm 3 as printed ends at an accepted leaf without one."""
    chain, one = tree([2], [ROOT]), probs([0.0, 0.0, 1.0], [0.0, 1.0, 0.0])
    for verify in REJECTING:
        assert verify(chain, one, one, Replay()) == Verified((0,), 1, (2, 1))


@pytest.mark.parametrize("verify", REJECTING)
def test_a_tree_without_nodes_gives_one_token_of_the_target(verify: object) -> None:
    target = probs([0.25, 0.0, 0.75])
    found = outcomes(lambda chance: verify(tree([], []), probs([0.0] * 3), target, chance))  # type: ignore[operator]
    assert found == pytest.approx({Verified((), 0, (0,)): 0.25, Verified((), 2, (2,)): 0.75})


def test_trees_without_nodes_need_no_draft() -> None:
    assert verify_greedy(tree([], []), probs([0.0, 1.0])) == Verified((), 1, (1,))
    assert verify_target_only(tree([], []), probs([0.0, 1.0]), Replay()) == Verified((), 1, (1,))


def test_equal_draft_and_target_accept_everything() -> None:
    same = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    for verify in REJECTING:
        found = outcomes(lambda chance, verify=verify: verify(tree([0, 1], [ROOT, 0]), same, same, chance).nodes)
        assert found == pytest.approx({(0, 1): 1.0})


def test_disjoint_supports_reject_everything() -> None:
    draft, target = probs([1.0, 0.0], [0.0, 0.0]), probs([0.0, 1.0], [0.5, 0.5])
    for verify in REJECTING:
        assert outcomes(lambda chance, verify=verify: verify(tree([0], [ROOT]), draft, target, chance)) == {
            Verified((), 1, (1,)): 1.0
        }


@pytest.mark.parametrize("verify", REJECTING)
def test_a_token_that_the_draft_cannot_draw_is_refused(verify: object) -> None:
    draft, target = probs([1.0, 0.0], [0.5, 0.5]), probs([0.5, 0.5], [0.5, 0.5])
    with pytest.raises(C2TError, match="token 1 has draft probability 0"):
        verify(tree([1], [ROOT]), draft, target, Replay())  # type: ignore[operator]


def test_a_sibling_after_the_draft_is_spent_is_refused() -> None:
    two = tree([0, 1], [ROOT, ROOT])
    draft, target = probs([1.0, 0.0], [0.0] * 2, [0.0] * 2), probs([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    with pytest.raises(C2TError, match="token 1 has draft probability 0"):
        verify_without_replacement(two, draft, target, Replay((REJECT,)))


def test_a_fork_is_no_chain() -> None:
    uniform = torch.full((5, 3), 1 / 3)
    with pytest.raises(C2TError, match="node -1 has 2 children"):
        verify_chain(FORK, uniform, uniform, Replay())


@pytest.mark.parametrize(
    ("draft", "target", "message"),
    [
        (probs([0.5, 0.5]), probs([0.5, 0.5], [0.5, 0.5]), r"draft_probs must be \(nodes \+ 1, vocab\)"),
        (probs([0.5, 0.5], [0.5, 0.5]), probs([0.5, 0.6], [0.5, 0.5]), r"target_probs: rows \[0\]"),
        (probs([0.5, 0.5], [0.5, 0.5]), probs([0.5, 0.5], [1.5, -0.5]), r"target_probs: rows \[1\]"),
        (probs([math.nan, 0.5], [0.5, 0.5]), probs([0.5, 0.5], [0.5, 0.5]), r"draft_probs: rows \[0\]"),
        (probs([0.5, 0.5, 0.0], [1.0, 0.0, 0.0]), probs([0.5, 0.5], [0.5, 0.5]), "one vocabulary"),
        (probs([1.0], [1.0]), probs([1.0], [1.0]), "has 1 tokens"),
    ],
)
def test_wrong_distributions_are_refused(draft: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(C2TError, match=message):
        verify_multi_round(tree([1], [ROOT]), draft, target, Replay())


@pytest.mark.parametrize(
    ("tokens", "parents", "message"), [([1, 2], [ROOT], "one shape"), ([1], [0], "earlier"), ([1], [-2], "earlier")]
)
def test_wrong_trees_are_refused(tokens: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(C2TError, match=message):
        tree(tokens, parents)


def test_residual_of_equal_distributions_is_the_target() -> None:
    half = torch.tensor([0.5, 0.5])
    assert torch.equal(residual(half, half), half)
    assert residual(torch.tensor([0.7, 0.3]), half).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_k_seq_selects_a_draw_as_often_as_spectr_says(k: int) -> None:
    """1 - (1 - beta)^k; at the best factor this is also factor * beta. One draw needs no division."""
    generator = torch.Generator().manual_seed(k)
    draft, target = torch.rand(2, 4, generator=generator, dtype=torch.float64).softmax(-1)
    factor = division_factor(draft, target, k)
    accepted = 1 - (1 - float(overlap(draft, target, factor))) ** k
    assert 1 <= factor <= k
    assert factor * float(overlap(draft, target, factor)) == pytest.approx(accepted, abs=1e-8)
    if k <= 3:

        def run(chance: Replay) -> bool:
            return select([chance.draw(draft) for _ in range(k)], draft, target, chance)[1]

        assert outcomes(run)[True] == pytest.approx(accepted, abs=1e-12)  # type: ignore[arg-type]


def test_k_seq_walks_the_sequences_that_agree() -> None:
    """Three chains 1-0, 1-2, 2-2: after token 1 the first two are verified together, and 2 is found in the second."""
    chains = tree([1, 0, 1, 2, 2, 2], [ROOT, 0, ROOT, 2, ROOT, 4])
    uniform = torch.full((7, 3), 1 / 3, dtype=torch.float64)
    assert verify_k_seq(chains, uniform, uniform, Replay((ACCEPT, REJECT, ACCEPT, 0))).tokens == (1, 2, 0)
    assert verify_k_seq(chains, uniform, uniform, Replay((ACCEPT, REJECT, ACCEPT, 0))).nodes == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_types_and_a_generator(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(2, 5, 4, generator=generator).to(dtype).softmax(-1)
    for verify in (verify_multi_round, verify_without_replacement, verify_k_seq):
        first, second = (verify(FORK, rows[0], rows[1], Sampler(torch.Generator().manual_seed(7))) for _ in range(2))
        assert first == second
        assert len(first.tokens) == len(first.nodes) + 1


def test_a_ratio_of_0_is_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.rand can return 0."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.zeros(()))
    chance = Sampler(torch.Generator())
    assert not chance.accepts(0.0)
    assert chance.accepts(1e-9)


def test_probabilities_at_a_temperature() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, -math.inf]])
    assert probabilities(logits, 0.0).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert torch.allclose(probabilities(logits, 0.5), (logits * 2).softmax(-1))
    for wrong in (-0.1, math.nan):
        with pytest.raises(C2TError, match="temperature"):
            probabilities(logits, wrong)


def test_refused_combinations_say_what_to_use() -> None:
    own_draw = Drafting(Draw.INDEPENDENT, Pruning.OWN_DRAW)
    with pytest.raises(
        ConfigError, match=r"verify_chain is not exact.*own draw.*use verify_greedy, verify_target_only"
    ):
        compatible(own_draw, Verification.CHAIN)
    with pytest.raises(ConfigError, match=r"could repeat.*verify_chain, verify_multi_round, verify_k_seq"):
        compatible(Drafting(Draw.INDEPENDENT), Verification.WITHOUT_REPLACEMENT)
    with pytest.raises(ConfigError, match=r"whole distribution.*verify_without_replacement"):
        compatible(Drafting(Draw.WITHOUT_REPLACEMENT), Verification.MULTI_ROUND)
    with pytest.raises(ConfigError, match=r"whole distribution.*verify_without_replacement"):
        compatible(Drafting(Draw.WITHOUT_REPLACEMENT, Pruning.BEFORE_DRAW), Verification.K_SEQ)
    with pytest.raises(ConfigError, match=r"number of draws.*verify_multi_round"):
        compatible(Drafting(Draw.INDEPENDENT, Pruning.BEFORE_DRAW), Verification.K_SEQ)
    with pytest.raises(ConfigError, match="no token was drawn"):
        compatible(Drafting(Draw.TOP_K), Verification.MULTI_ROUND)


def test_every_tree_may_be_verified_without_the_draft() -> None:
    for draw in Draw:
        for pruning in Pruning:
            assert {Verification.GREEDY, Verification.TARGET_ONLY} <= exact_verifications(Drafting(draw, pruning))


def test_the_documented_table_is_the_code() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/exactness.md").read_text(encoding="utf-8")
    lines = [line.replace("`", "").strip("| ") for line in page.splitlines() if line.startswith("| ")]
    header, _, *rows = [re.split(r" \| ", line) for line in lines]
    documented = {
        row[0]: {Verification(name) for name, answer in zip(header[1:], row[1:], strict=True) if answer == "yes"}
        for row in rows
    }
    assert documented == {
        f"{draw.name}, {pruning.name}": set(exact_verifications(Drafting(draw, pruning)))
        for draw in Draw
        for pruning in Pruning
    }


def generated(rounds_start_stale: bool) -> tuple[int, ...]:
    """Eight tokens of a greedy target, rounds of two drafted tokens. Stale: S4's algorithm 1 as printed, whose line 10
    reads, in every round, the target's distribution after the first input."""
    draft, target = toy.one_hot(toy.model(3, 4)), toy.one_hot(toy.model(87, 4))
    output: tuple[int, ...] = ()
    while len(output) < 8:
        tree = toy.grow(
            lambda prefix, so_far=output: draft((*so_far, *prefix)), Draw.TOP_K, Pruning.BEFORE_DRAW, Replay(()), (1, 1)
        )
        rows = [target((*output, *prefix)) for prefix in toy.prefixes(tree)]
        rows[0] = target(()) if rounds_start_stale else rows[0]
        output += verify_greedy(tree, torch.stack(rows)).tokens
    return output[:8]


def test_a_later_round_starts_after_the_whole_output() -> None:
    target = toy.one_hot(toy.model(87, 4))
    plain: tuple[int, ...] = ()
    while len(plain) < 8:
        plain += (int(target(plain).argmax()),)
    assert generated(rounds_start_stale=False) == plain
    assert generated(rounds_start_stale=True) != plain
