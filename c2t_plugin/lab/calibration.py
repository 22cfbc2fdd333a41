"""Whether a confidence is the probability of being accepted, and what can be done about it after training.

A monotone map that is linear in the logit (Platt's) can be folded into the classifier's last layer: the file stays a
plain two-layer network. An isotonic map cannot, and changes the order of nodes no more than Platt's does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.sweeps import path_minimum
from c2t_plugin.traces.forest import Forest

BINS = 15


@dataclass(frozen=True)
class Calibration:
    """confidence, accepted: means. error: expected calibration error, the mean distance between confidence and accepted
    share over bins of equal width, weighted by their nodes. bins: per non-empty bin (nodes, confidence, accepted)."""

    confidence: float
    accepted: float
    error: float
    bins: list[tuple[int, float, float]]


def calibration(confidence: Tensor, accepted: Tensor, bins: int = BINS) -> Calibration:
    """Compare. confidence: (nodes,) in [0, 1]. accepted: (nodes,) bool. C2TError if there are none."""
    if not len(confidence):
        raise C2TError("no nodes to judge the calibration on")
    confidence, label = confidence.double(), accepted.double()
    place = (confidence * bins).long().clamp(0, bins - 1)
    count, total, hits = (
        torch.zeros(bins, dtype=torch.float64).index_add_(0, place, value)
        for value in (torch.ones_like(label), confidence, label)
    )
    found = [(int(n), float(c / n), float(a / n)) for n, c, a in zip(count, total, hits, strict=True) if n > 0]
    error = float((total - hits).abs().sum() / len(label))
    return Calibration(float(confidence.mean()), float(label.mean()), error, found)


def fit_platt(logits: Tensor, accepted: Tensor, rounds: int = 50) -> tuple[float, float]:
    """Slope and shift of the most likely sigmoid(slope * logit + shift), by Newton's method.

    logits: (nodes,) float. accepted: (nodes,) bool. C2TError if all or none are accepted, or the slope is not positive.
    """
    label = accepted.double()
    if not 0 < label.sum() < len(label):
        raise C2TError("a calibration needs accepted and rejected nodes")
    x = torch.stack([logits.double(), torch.ones_like(label)], dim=1)
    found = torch.tensor([1.0, 0.0], dtype=torch.float64)

    def loss(at: Tensor) -> float:
        return float(F.binary_cross_entropy_with_logits(x @ at, label, reduction="sum"))

    for _ in range(rounds):
        predicted = torch.sigmoid(x @ found)
        weight = predicted * (1 - predicted)
        # the ridge keeps separable data finite
        curvature = x.T @ (x * weight[:, None]) + 1e-6 * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(curvature, x.T @ (label - predicted))
        # far from the optimum a whole step may lead away from it
        before = loss(found)
        while loss(found + step) > before and float(step.abs().max()) > 1e-9:
            step = step / 2
        found = found + step
        if float(step.abs().max()) < 1e-9:
            break
    slope, shift = (float(value) for value in found)
    if slope <= 0.0:
        raise C2TError(f"the logits are no better than chance here (slope {slope:.3f}); nothing to calibrate")
    return slope, shift


# Of a confidence, so that its logit is finite.
LEAST = 1e-6


@torch.no_grad()
def calibrated(classifier: NodeClassifier, forest: Forest) -> tuple[NodeClassifier, float, float]:
    """A copy whose lowest confidence from the root down to a node is that node's chance of acceptance on this forest.

    Planners read it so, in chains as in trees, since a node is accepted only with all above it. Nodes without a
    confidence are left out. Returns the slope and shift of the logits too.
    """
    lowest = path_minimum(forest, classifier.confidence(forest.stats()))
    known = lowest.isfinite()
    logits = torch.logit(lowest[known].double().clamp(LEAST, 1 - LEAST))
    slope, shift = fit_platt(logits, forest.accepted[known])
    return fold(classifier, slope, shift), slope, shift


def mapped(confidence: float, slope: float, shift: float) -> float:
    """What becomes of a confidence, or of a beta, in a folded classifier."""
    if confidence in (0.0, 1.0):
        return confidence
    return 1.0 / (1.0 + math.exp(-slope * math.log(confidence / (1.0 - confidence)) - shift))


@torch.no_grad()
def fold(classifier: NodeClassifier, slope: float, shift: float) -> NodeClassifier:
    """A copy whose logit is slope * logit + shift: same file format, same order of nodes. C2TError unless slope > 0."""
    if not slope > 0.0:
        raise C2TError(f"slope must be positive, got {slope}")
    copy = NodeClassifier(replace(classifier.spec))
    copy.load_state_dict(classifier.state_dict())
    copy.out.weight *= slope
    copy.out.bias.copy_(copy.out.bias * slope + shift)
    return copy.eval().requires_grad_(False)
