"""Acceptance counting against hand-made cases and against exact enumeration."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.pairs.toy.acceptance import (
    Visits,
    accepted_runs,
    continue_prompts,
    draft_guesses,
    expected_runs,
    interval,
    mean_accepted,
    visits_of,
    walk,
)
from benchmarks.pairs.toy.models import new_head, new_target
from benchmarks.pairs.toy.recipe import Recipe
from c2t_plugin.traces.file import novel_tokens

SMALL = Recipe(vocab_size=320, hidden=64, layers=4, intermediate=64, captured=(1, 2, 3))


@pytest.mark.parametrize(
    ("tokens", "root", "novel"),
    [
        ([1, 2, 3, 1, 2, 3], 5, False),
        ([1, 2, 3, 4, 2, 3], 5, True),
        ([1, 1, 1, 1], 3, False),
        ([1, 1, 1], 2, True),
        ([1, 2], 1, True),
        ([1, 2, 3, 9, 1, 2, 3], 6, False),
        ([1, 2, 3, 1, 2, 3], 4, True),
    ],
    ids=["repeated", "last two only", "overlapping", "first", "too short", "with a gap", "one token earlier"],
)
def test_novelty_of_three_grams(tokens: list[int], root: int, novel: bool) -> None:
    assert novel_tokens(tokens, size=3)[root] is novel


def test_runs_end_at_the_first_mismatch_and_at_the_end_of_the_text() -> None:
    tokens = torch.tensor([[5, 6, 7, 8]])
    # rows: depth 0 and 1; columns: root position
    guesses = torch.tensor([[[6, 7, 8, 9], [7, 0, 0, 0]]])
    assert accepted_runs(guesses, tokens).tolist() == [[2, 1, 1, 0]]
    wrong_first = torch.tensor([[[0, 7, 8, 9], [7, 8, 0, 0]]])
    assert accepted_runs(wrong_first, tokens).tolist() == [[0, 2, 1, 0]]


def test_walk_moves_by_the_run_and_the_bonus() -> None:
    visits = walk(
        list(range(20)), runs=[0, 0, 2, 9, 9, 1, 9, 0, 9], accepted=[0, 0, 2, 9, 9, 1, 9, 0, 9], first=2, end=8
    )
    assert visits.accepted == (2.0, 1.0, 0.0)
    assert visits.novel == (True, True, True)


def test_expected_runs_are_exact_on_a_toy_pair() -> None:
    """A target with a fixed table p(next | last) over 3 tokens, a draft that proposes 0 then 1, enumerated."""
    table = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    exact = 0.5 + 0.5 * 0.3  # p(0 | 0) + p(0 | 0) p(1 | 0)
    total = 0.0
    for first, second in itertools.product(range(3), repeat=2):
        tokens = torch.tensor([[0, first, second]])
        guesses = torch.tensor([[[0, 0, 0], [1, 1, 1]]])
        # the guess of depth 1 is judged after the sampled first token
        chances = torch.stack([table[tokens, 0], table[tokens.roll(-1, 1), 1]], dim=1)
        weight = float(table[0, first] * table[first, second])
        total += weight * float(expected_runs(guesses, chances, tokens)[0, 0])
    # fp32 sums of nine products
    assert total == pytest.approx(exact, rel=1e-6)


def test_means_count_steps_and_can_leave_out_loops() -> None:
    visits = [Visits((4.0, 0.0), (False, True)), Visits((2.0,), (True,))]
    assert mean_accepted(visits) == 2.0
    assert mean_accepted(visits, novel_only=True) == 1.0
    low, high = interval(visits)
    assert low <= 2.0 <= high


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return new_target(SMALL).eval().requires_grad_(False)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 320, (n,), generator=generator).tolist() for n in (16, 20, 35)]


def test_a_draft_that_is_the_target_is_always_accepted(target: LlamaForCausalLM) -> None:
    class SeesAll(LlamaForCausalLM):
        """The target itself, told the first token that a stand-alone draft never gets."""

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
            known = torch.cat([self.first.expand(len(input_ids), 1), input_ids], dim=1)
            return super().forward(input_ids=known, use_cache=use_cache, logits_to_keep=input_ids.shape[1])

    oracle = SeesAll(target.config)
    oracle.load_state_dict(target.state_dict())
    oracle.first = torch.tensor([[7]])
    same_start = [[7, *prompt[1:]] for prompt in prompts()]
    texts = continue_prompts(target, same_start, new=12, gamma=4, sample=False, seed=0)
    assert sorted(text.prompt for text in texts) == [16, 32]
    visits = visits_of(oracle.eval(), target, texts, gamma=4, sample=False)
    # 12 new tokens in steps of 5
    assert [v.accepted for v in visits] == [(4.0, 4.0, 4.0)] * 3


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "mtp"])
@torch.no_grad()
def test_head_guesses_are_what_a_chain_on_its_own_tokens_drafts(kind: str, target: LlamaForCausalLM) -> None:
    """Along the text the guesses must equal a chain that feeds back its own tokens, as long as these match."""
    head = new_head(kind, SMALL, target)
    tokens = torch.tensor([prompts()[1]])
    root = 9
    guesses = draft_guesses(head, target, tokens, gamma=3)
    followed = tokens.clone()
    followed[0, root + 1 : root + 3] = guesses[0, 0, root]
    again = draft_guesses(head, target, followed, gamma=3)
    assert again[0, 0, root] == guesses[0, 0, root]
    followed[0, root + 2] = again[0, 1, root]
    final = draft_guesses(head, target, followed, gamma=3)
    assert accepted_runs(final, followed)[0, root] >= 2
