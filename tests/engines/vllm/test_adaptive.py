"""The scorer of model runner V2 against chain mode's own scorer, and what vLLM's adaptive verification makes of it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from c2t_plugin.classifier import EXTENDED_FEATURES, ClassifierSpec, NodeClassifier
from c2t_plugin.engines.vllm.adaptive import StepScorer
from c2t_plugin.scorer import ChainScorer

ROWS, STEPS, VOCAB = 5, 4, 40


@pytest.fixture
def classifier() -> NodeClassifier:
    torch.manual_seed(12)
    width = len(EXTENDED_FEATURES)
    spec = ClassifierSpec(features=EXTENDED_FEATURES, shift=(0.0,) * width, scale=(1.0,) * width, top_m=30)
    return NodeClassifier(spec).eval().requires_grad_(False)


def logits(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def draft(scorer: StepScorer, steps: list[torch.Tensor]) -> torch.Tensor:
    """Conditional confidences [rows, steps] of one draft."""
    found = torch.full((ROWS, STEPS), 7.0)
    at = torch.zeros((), dtype=torch.int64)
    unused = torch.zeros(ROWS)
    for number, each in enumerate(steps):
        at.fill_(number)  # vLLM keeps one tensor and writes into it
        scorer.predict(each, torch.arange(len(each)).flip(0), at, found, unused)
    return found


def scorer_for(classifier: NodeClassifier, beta: float = 0.0) -> StepScorer:
    return StepScorer(classifier, rows=ROWS, max_depth=STEPS, beta=beta, device="cpu", keep_stats=True)


def by_chain_mode(classifier: NodeClassifier, steps: list[torch.Tensor], beta: float) -> ChainScorer:
    scorer = ChainScorer(classifier, slots=ROWS, rows=ROWS, max_depth=STEPS, beta=beta, device="cpu", keep_stats=True)
    rows = torch.arange(len(steps[0]))
    scorer.write_seed(rows, steps[0])
    scorer.begin(rows)
    for each in steps[1:]:
        scorer.step(each)
    return scorer


def test_a_step_that_drafts_nothing_keeps_nothing(classifier: NodeClassifier, monkeypatch: pytest.MonkeyPatch):
    """The kernel refuses to look for the first of no columns."""

    def refused(confidence: torch.Tensor, *_: object) -> torch.Tensor:
        raise ValueError(f"at least one column, got {confidence.shape}")

    monkeypatch.setattr("c2t_plugin.engines.vllm.adaptive.early_stop", refused)
    found = scorer_for(classifier).kept(3, 0)
    assert (found.tolist(), found.dtype) == ([0, 0, 0], torch.int32)


@pytest.mark.parametrize("beta", [0.0, 0.45, 0.5, 0.55, 1.0])
def test_kept_lengths_are_chain_modes(classifier: NodeClassifier, beta: float):
    scorer = scorer_for(classifier, beta)
    for seed in (0, 10):  # the second draft must not remember the first
        steps = [logits(seed + number) for number in range(STEPS)]
        draft(scorer, steps)
        assert torch.equal(scorer.kept(ROWS, STEPS), by_chain_mode(classifier, steps, beta).end(ROWS))


@pytest.mark.parametrize("depth", [1, 2, STEPS])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.55, 1.0])
def test_chains_are_alive_as_long_as_chain_modes(classifier: NodeClassifier, beta: float, depth: int):
    scorer = scorer_for(classifier, beta)
    scorer.set_max_depth(depth)
    steps = [logits(number) for number in range(STEPS)]
    draft(scorer, steps)
    for taken in range(1, STEPS + 1):
        theirs = ChainScorer(classifier, slots=ROWS, rows=ROWS, max_depth=STEPS, beta=beta, device="cpu")
        theirs.set_max_depth(depth)
        theirs.write_seed(torch.arange(ROWS), steps[0])
        theirs.begin(torch.arange(ROWS))
        for each in steps[1:taken]:
            theirs.step(each)
        assert scorer.any_alive_after(ROWS, taken) == theirs.any_alive()


def test_recorded_statistics_are_chain_modes(classifier: NodeClassifier):
    scorer, steps = scorer_for(classifier), [logits(number) for number in range(STEPS)]
    draft(scorer, [logits(9)] * STEPS)  # the second draft must not remember the first
    draft(scorer, steps)
    torch.testing.assert_close(scorer.stats(ROWS), by_chain_mode(classifier, steps, 0.0).stats(ROWS))


def test_the_product_of_the_conditionals_is_the_running_minimum(classifier: NodeClassifier):
    steps = [logits(number) for number in range(STEPS)]
    conditional = draft(scorer_for(classifier), steps)
    expected = by_chain_mode(classifier, steps, 0.0).confidence(ROWS).cummin(dim=1).values
    # a product of quotients in float32
    torch.testing.assert_close(conditional.cumprod(dim=1), expected, atol=1e-6, rtol=1e-5)
    assert bool((conditional <= 1.0).all()) and bool((conditional > 0.0).all())


def test_below_beta_nothing_survives(classifier: NodeClassifier):
    steps = [logits(number) for number in range(STEPS)]
    scorer = scorer_for(classifier, 0.5)
    survival = draft(scorer, steps).cumprod(dim=1)
    lengths = scorer.kept(ROWS, STEPS)
    assert len(set(lengths.tolist())) > 1, "choose another seed: beta cuts nothing or everything"
    assert torch.equal((survival > 0).sum(dim=1), lengths.long())


def test_the_longest_chain_holds(classifier: NodeClassifier):
    scorer = scorer_for(classifier)
    scorer.set_max_depth(2)
    survival = draft(scorer, [logits(number) for number in range(STEPS)]).cumprod(dim=1)
    assert scorer.kept(ROWS, STEPS).tolist() == [2] * ROWS
    assert (survival > 0).sum(dim=1).tolist() == [2] * ROWS


def test_rows_of_a_smaller_batch_are_its_own_and_others_stay(classifier: NodeClassifier):
    """vLLM keys its own features by request slot; what adaptive verification reads goes by place in the batch."""
    found = draft(scorer_for(classifier), [logits(number, rows=2) for number in range(STEPS)])
    assert bool((found[2:] == 7.0).all())
    whole = [torch.cat([logits(number, rows=2), logits(50 + number, rows=3)]) for number in range(STEPS)]
    torch.testing.assert_close(found[:2], draft(scorer_for(classifier), whole)[:2])


def test_a_token_without_statistics_is_kept_and_counted(classifier: NodeClassifier):
    steps = [logits(number) for number in range(STEPS)]
    steps[1][3, 0] = math.nan
    scorer = scorer_for(classifier)
    conditional = draft(scorer, steps)
    assert conditional[3, 1] == 1.0
    assert bool(conditional.isfinite().all())
    assert scorer.non_finite.item() == 1
    expected = by_chain_mode(classifier, steps, 0.0).confidence(ROWS)
    torch.testing.assert_close(scorer._state.confidence, expected, equal_nan=True)


def test_rows_that_pad_a_captured_batch_are_not_counted(classifier: NodeClassifier):
    scorer, found = scorer_for(classifier), torch.zeros(ROWS, STEPS)
    slots = torch.tensor([3, 0, -1, -1, -1])
    scorer.predict(torch.full((ROWS, VOCAB), math.nan), slots, torch.zeros((), dtype=torch.int64), found, found[:, 0])
    assert scorer.non_finite.item() == 2


def test_what_was_verified_is_counted(classifier: NodeClassifier):
    scorer = scorer_for(classifier)
    # three accepted and the bonus; one of two accepted; none of two; a plain step; a request in its prompt
    sampled, rejected = torch.tensor([4, 2, 1, 1, 0]), torch.tensor([0, 1, 2, 0, 0])
    scorer.observe(torch.arange(ROWS), sampled, rejected)
    assert scorer.outcomes() == ([0, 0, 2, 1, 0], 4)
    scorer.observe(torch.arange(1), torch.tensor([5]), torch.tensor([0]))
    assert scorer.outcomes() == ([0, 0, 2, 1, 1], 8)
    scorer.forget()
    assert scorer.outcomes() == ([0] * 5, 0)
    assert scorer.learnt() is None


class Estimator:
    """What vLLM's keeps, taught by hand."""

    def __init__(self) -> None:
        self.slope, self.intercepts = torch.full((1,), 0.5), torch.full((STEPS,), -0.2)
        self.features, self.predictions = torch.zeros(2, ROWS, STEPS)
        self.info, self.grad, self.counts = torch.ones(STEPS, 3), torch.ones(STEPS, 2), torch.ones(STEPS)
        self.told: list[tuple[torch.Tensor, ...]] = []

    def step(self, *outcome: torch.Tensor) -> None:
        self.told.append(outcome)


def test_vllms_estimator_learns_what_chances_mean(classifier: NodeClassifier):
    steps = [logits(number) for number in range(STEPS)]
    scorer, estimator = scorer_for(classifier), Estimator()
    scorer.learn_by(estimator)
    # it begins with the classifier's own word, and with nothing counted
    said = draft(scorer_for(classifier), steps)
    torch.testing.assert_close(draft(scorer, steps), said.clamp(1e-4, 1 - 1e-4))
    assert not any(each.any() for each in (estimator.info, estimator.grad, estimator.counts))
    # slots are rows from behind
    torch.testing.assert_close(estimator.predictions.flip(0), said.clamp(1e-4, 1 - 1e-4))
    torch.testing.assert_close(estimator.features.flip(0), torch.logit(said, eps=1e-4))
    estimator.slope.fill_(0.5)
    estimator.intercepts.copy_(torch.arange(STEPS) - 1.0)
    expected = torch.sigmoid(0.5 * torch.logit(said, eps=1e-4) + torch.arange(STEPS) - 1.0)
    torch.testing.assert_close(draft(scorer, steps), expected)
    assert scorer.learnt() == {"slope": 0.5, "offsets": [-1.0, 0.0, 1.0, 2.0]}
    outcome = torch.arange(ROWS), torch.tensor([4, 2, 1, 1, 0]), torch.tensor([0, 1, 2, 0, 0])
    scorer.observe(*outcome)
    assert len(estimator.told) == 1 and all(a is b for a, b in zip(estimator.told[0], outcome, strict=True))
    assert scorer.outcomes()[1] == 4
    # what an engine's own requests have taught it before it serves is gone
    scorer.forget()
    assert scorer.learnt() == {"slope": 1.0, "offsets": [0.0] * STEPS}


@pytest.mark.vllm
@pytest.mark.parametrize("budget", [1, 3, 6])
def test_vllms_budget_goes_to_the_most_confident_chains(classifier: NodeClassifier, budget: int):
    pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import _assign_draft_token_budget

    steps = [logits(number) for number in range(STEPS)]
    conditional = draft(scorer_for(classifier), steps)
    slots = torch.tensor([3, 0, 4, 1, 2])
    by_slot = torch.empty_like(conditional)
    by_slot[slots] = conditional
    capacities = torch.tensor([4, 4, 2, 4, 4], dtype=torch.int32)
    survival = by_chain_mode(classifier, steps, 0.0).confidence(ROWS).cummin(dim=1).values
    survival[2, 2:] = -1.0
    # equal to the last bit where a minimum is carried on: the order of these does not matter to the lengths' sum
    best = survival.flatten().sort(descending=True).values[:budget].sum()
    _assign_draft_token_budget(by_slot, slots, capacities, budget, STEPS)
    assert int(capacities.sum()) == budget and int(capacities[2]) <= 2
    chosen = sum(survival[row, : int(length)].sum() for row, length in enumerate(capacities))
    torch.testing.assert_close(chosen, best, atol=1e-5, rtol=0)


@pytest.mark.vllm
@pytest.mark.parametrize("beta", [0.0, 0.45, 0.5, 1.0])
def test_vllms_budget_ends_at_beta_however_cheap_a_token_is(classifier: NodeClassifier, beta: float):
    pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    steps = [logits(number) for number in range(STEPS)]
    scorer = scorer_for(classifier, beta)
    conditional = draft(scorer, steps)
    names = [str(row) for row in range(ROWS)]
    manager = AdaptiveVerificationManager.__new__(AdaptiveVerificationManager)
    manager.num_speculative_steps, manager.num_bonus_tokens, manager._max_total_logits = STEPS, 1, 10_000
    manager._stale_confidences, manager._stale_idx = [SimpleNamespace(np=conditional.numpy())], 0
    ones = np.ones(ROWS, dtype=np.int32)
    manager.req_states = SimpleNamespace(
        req_id_to_index={name: row for row, name in enumerate(names)},
        num_computed_tokens_np=ones,
        prefill_len=SimpleNamespace(np=ones),
    )
    # a step costs something, a token nothing: only what cannot be accepted is left out
    manager.cost_tables = np.zeros(ROWS + 1), np.ones(ROWS * (STEPS + 1) + 1)
    tokens = manager.get_num_tokens(dict.fromkeys(names, STEPS + 1), dict.fromkeys(names, [-1] * STEPS))
    kept = int(scorer.kept(ROWS, STEPS).sum())
    assert tokens == ROWS + kept
    drafts = np.full(ROWS, STEPS)
    compacted, _ = manager.compact_batch(drafts, drafts + 1, (np.arange(ROWS + 1) * (STEPS + 1)).astype(np.int32))
    assert compacted.sum() == tokens and compacted.max() <= STEPS + 1
