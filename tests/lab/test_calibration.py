"""Calibration: the error by hand, a known distortion found again, and folding into the network."""

from __future__ import annotations

import pytest
import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, load_classifier, save_classifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.calibration import calibration, fit_platt, fold


def test_the_error_by_hand() -> None:
    confidence = torch.tensor([0.1, 0.3, 0.6, 0.8, 1.0])
    accepted = torch.tensor([False, True, True, False, True])
    found = calibration(confidence, accepted, bins=2)
    # below one half: mean .2, accepted .5; above: mean .8, accepted 2/3
    assert found.bins == [(2, pytest.approx(0.2), 0.5), (3, pytest.approx(0.8), pytest.approx(2 / 3))]
    assert found.error == pytest.approx((2 * 0.3 + 3 * (0.8 - 2 / 3)) / 5)
    assert (found.confidence, found.accepted) == (pytest.approx(0.56), pytest.approx(0.6))


def test_nothing_has_no_calibration() -> None:
    with pytest.raises(C2TError, match="no nodes"):
        calibration(torch.tensor([]), torch.tensor([]).bool())


def labelled(slope: float, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200_000, generator=generator) * 2 - 1
    return logits, torch.rand(len(logits), generator=generator) < torch.sigmoid(slope * logits + shift)


@pytest.mark.parametrize(("slope", "shift"), [(1.0, 0.0), (0.5, 1.0), (2.0, -3.0), (0.3, 6.0)])
def test_a_distortion_is_found_again(slope, shift) -> None:
    logits, accepted = labelled(slope, shift)
    # 200,000 rows leave standard errors below .05, where most are accepted
    assert fit_platt(logits, accepted) == pytest.approx((slope, shift), abs=0.15)


def test_the_map_removes_the_error() -> None:
    logits, accepted = labelled(0.5, 1.0)
    slope, shift = fit_platt(logits, accepted)
    assert calibration(torch.sigmoid(logits), accepted).error > 0.1
    assert calibration(torch.sigmoid(slope * logits + shift), accepted).error < 0.005


@pytest.mark.parametrize(
    ("logits", "accepted", "message"),
    [([0.0, 1.0], [True, True], "accepted and rejected"), ([0.0, 1.0, 0.2, 0.9], [True, False] * 2, "than chance")],
)
def test_what_cannot_be_calibrated(logits, accepted, message) -> None:
    with pytest.raises(C2TError, match=message):
        fit_platt(torch.tensor(logits), torch.tensor(accepted))


def test_a_folded_map_is_part_of_the_file(tmp_path) -> None:
    torch.manual_seed(0)
    classifier = NodeClassifier(ClassifierSpec(suggested_beta=0.3))
    save_classifier(fold(classifier, 0.5, 1.0), tmp_path / "folded")
    features = torch.rand(50, 3)
    found = load_classifier(tmp_path / "folded")
    with torch.no_grad():
        # one more rounding per weight
        torch.testing.assert_close(found(features), classifier(features) * 0.5 + 1.0, atol=1e-5, rtol=1e-5)
    assert found.spec == classifier.spec
    with pytest.raises(C2TError, match="must be positive"):
        fold(classifier, 0.0, 1.0)
