"""Confidences that mean what they turn out to mean, on streams whose truth is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from c2t_plugin.planner.calibration import FIT_EVERY, WINDOW, Calibration

D_MAX = 4
SLOPE, OFFSETS = 1.6, torch.tensor([-0.2, -0.8, -1.0, -1.5], dtype=torch.float64)


def stream(steps: int, seed: int, requests: int = 4) -> tuple[Tensor, Tensor]:
    """Confidences (steps, requests, D_MAX), and the truth about them."""
    drawn = torch.randn(steps, requests, D_MAX, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits = drawn.cumsum(-1).sub(torch.arange(D_MAX) * 0.7)
    return torch.sigmoid(logits), torch.sigmoid(SLOPE * logits + OFFSETS)


def outcomes(truth: Tensor, seed: int) -> Tensor:
    """(requests,) accepted tokens: each with its own probability, as many as come before the first refusal."""
    drawn = torch.rand(truth.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn < truth).long().cumprod(-1).sum(-1)


def taught(steps: int, verified: Tensor | int = D_MAX, poison: float = 0.0) -> Calibration:
    """verified: draft tokens of each request. poison: share of the steps that say the contrary."""
    calibration = Calibration(D_MAX)
    confidences, truths = stream(steps, seed=1)
    for step, (confidence, truth) in enumerate(zip(confidences, truths, strict=True)):
        # one token a request: acceptance of a token *and* all before it is what a confidence is about
        depth = step % D_MAX
        hit = (torch.rand(len(truth), generator=torch.Generator().manual_seed(step)) < truth[:, depth]).long()
        if step < steps * poison:
            hit = 1 - hit
        alone = torch.full_like(confidence, torch.nan)
        alone[:, depth] = confidence[:, depth]
        calibration.observe(alone, torch.full((len(truth),), D_MAX), hit * D_MAX)
    return calibration


def nll(predicted: Tensor, truth: Tensor) -> float:
    return float(binary_cross_entropy(predicted, truth))


def test_without_evidence_it_changes_nothing():
    confidence = torch.tensor([[0.9, 0.5, torch.nan, 0.0]])
    assert Calibration(D_MAX)(confidence).equal(confidence.double()) is False  # NaN equals nothing
    assert Calibration(D_MAX)(confidence).nan_to_num(2.0).tolist() == confidence.double().nan_to_num(2.0).tolist()


def test_it_finds_slope_and_offsets():
    calibration = taught(4000)
    assert calibration.slope == pytest.approx(SLOPE, abs=0.2)
    assert calibration.offsets.tolist() == pytest.approx(OFFSETS.tolist(), abs=0.35)


@pytest.mark.parametrize("states", [512, 2048, 8192])
def test_it_predicts_better_than_what_it_started_from(states: int):
    calibration = taught(states // 4)
    confidence, truth = stream(500, seed=2)
    before, after, best = (
        nll(each, truth) for each in (confidence, calibration(confidence.view(-1, D_MAX)).view_as(confidence), truth)
    )
    assert best < after < before
    assert after - best < 0.25 * (before - best)


def test_only_verified_tokens_are_evidence():
    calibration = Calibration(D_MAX)
    calibration.observe(torch.full((2, D_MAX), 0.7), torch.tensor([1, 3]), torch.tensor([0, 2]))
    assert calibration.seen == 4
    assert calibration._accepted[:4].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert calibration._depths[:4].tolist() == [0, 0, 1, 2]


def test_a_cut_by_confidence_does_not_bend_it():
    """What is verified is chosen by confidence: the fit is the same within its error."""
    confidences, truths = stream(3000, seed=3)
    found = []
    for beta in (0.0, 0.4):
        calibration = Calibration(D_MAX)
        for step, (confidence, truth) in enumerate(zip(confidences, truths, strict=True)):
            verified = (confidence.cummin(-1).values >= beta).sum(-1)
            joint = truth.cummin(-1).values
            drawn = torch.rand(len(truth), generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            calibration.observe(
                confidence, verified, (drawn[:, None] < joint).long().cumprod(-1).sum(-1).minimum(verified)
            )
        found.append(calibration(torch.tensor([[0.7, 0.7, 0.7, 0.7]])))
    assert (found[0] - found[1]).abs().max() < 0.08


def test_tokens_without_a_confidence_are_no_evidence():
    calibration = Calibration(D_MAX)
    calibration.observe(torch.full((1, D_MAX), torch.nan), torch.tensor([D_MAX]), torch.tensor([0]))
    assert calibration.seen == 0


def test_it_follows_the_traffic():
    calibration = taught(2 * WINDOW // 4)
    for step in range(2 * WINDOW // 8):
        confidence = torch.full((8, 1), 0.5)
        calibration.observe(confidence, torch.ones(8, dtype=torch.long), torch.tensor([int(step % 10 < 1)] * 8))
    assert float(calibration(torch.tensor([[0.5]]))) == pytest.approx(0.1, abs=0.05)


def test_a_poisoned_tenth_does_not_undo_it():
    confidence, truth = stream(500, seed=4)
    clean, poisoned = (
        nll(calibration(confidence.view(-1, D_MAX)).view_as(confidence), truth)
        for calibration in (taught(1000), taught(1000, poison=0.1))
    )
    before = nll(confidence, truth)
    assert clean < poisoned < before


def test_what_predicts_worse_than_the_classifier_is_thrown_away():
    calibration = Calibration(1)
    lots = torch.full((FIT_EVERY, 1), 0.5)
    ones = torch.ones(FIT_EVERY, dtype=torch.long)
    for _ in range(3):
        calibration.observe(lots, ones, ones)
    assert float(calibration(lots[:1])) > 0.9
    calibration.observe(lots, ones, 0 * ones)
    # by chance the window still says otherwise: what was learnt from it is not believed
    assert float(calibration(lots[:1])) == 0.5
    raw, fitted = calibration.nll
    assert fitted > raw


def test_a_chain_that_is_always_accepted_stays_finite():
    calibration = Calibration(D_MAX)
    for _ in range(200):
        calibration.observe(torch.ones(8, D_MAX), torch.full((8,), D_MAX), torch.full((8,), D_MAX))
    assert calibration(torch.ones(1, D_MAX)).isfinite().all()
    assert calibration.state()["seen"] == 200 * 8 * D_MAX
