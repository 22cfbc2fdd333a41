"""Fitting a classifier to labelled nodes: the paper's optimiser and budget (C2T B.2), and two recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from c2t_plugin.classifier import PAPER_HIDDEN, PAPER_PARAMETERS, ClassifierSpec, NodeClassifier
from c2t_plugin.errors import C2TError
from c2t_plugin.features import FEATURES, PAPER_FEATURES
from c2t_plugin.lab.scores import NodeScores

EPOCHS = 10
BATCH = 1024
LEARNING_RATE = 1e-3
# Epochs whose recall is within this of the best count as similar; the paper names no number.
SIMILAR_RECALL = 0.005


@dataclass(frozen=True)
class FitRecipe:
    """How to make a classifier of nodes.

    features: names from FEATURES. standardise: to mean 0 and standard deviation 1 over the training rows.
    negatives_per_positive: rejected nodes kept per accepted one, None keeps all.
    choose: the epoch by "recall" first and then the smaller theta (C2T B.2), or by the smallest "bce".
    """

    features: tuple[str, ...]
    standardise: bool
    negatives_per_positive: float | None
    choose: str

    def __post_init__(self) -> None:
        unknown = [name for name in self.features if name not in FEATURES]
        if unknown or not self.features:
            raise C2TError(f"features must be some of {', '.join(FEATURES)}; got {', '.join(self.features) or 'none'}")
        ratio = self.negatives_per_positive
        if ratio is not None and not (math.isfinite(ratio) and ratio > 0):
            raise C2TError(f"negatives per positive must be a positive number, got {ratio}")


# The paper names no ratio of negatives; 10 is what the project tried it with.
FIT_RECIPES = {
    "default": FitRecipe(("joint_log_prob", "entropy", "depth"), True, None, "bce"),
    "paper": FitRecipe(PAPER_FEATURES, False, 10.0, "recall"),
}


def sample_negatives(accepted: Tensor, per_positive: float | None, generator: torch.Generator) -> Tensor:
    """Rows to train on, (rows,) int64: all accepted ones and per_positive times as many rejected ones, drawn without
    repetition; all of them if that is more than there are or per_positive is None. accepted: (nodes,) bool."""
    if per_positive is None:
        return torch.arange(len(accepted))
    positive, negative = accepted.nonzero().flatten(), (~accepted).nonzero().flatten()
    wanted = min(len(negative), round(per_positive * len(positive)))
    drawn = negative[torch.randperm(len(negative), generator=generator)[:wanted]]
    return torch.cat([positive, drawn])


def new_classifier(recipe: FitRecipe, features: Tensor, spec: dict[str, Any], seed: int) -> NodeClassifier:
    """An untrained classifier, its scaling taken from features (rows, F). spec: further fields of ClassifierSpec.

    The paper's three features make the paper's 241 parameters.
    """
    shift, scale = torch.zeros(features.shape[1]), torch.ones(features.shape[1])
    if recipe.standardise:
        shift, scale = features.double().mean(0), features.double().std(0)
        # a constant feature carries nothing; dividing by 1 keeps it at 0
        scale = torch.where(scale > 0, scale, 1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = NodeClassifier(
            ClassifierSpec(
                features=recipe.features,
                shift=tuple(shift.tolist()),
                scale=tuple(scale.tolist()),
                negatives_per_positive=recipe.negatives_per_positive,
                **spec,
            )
        )
    count = sum(parameter.numel() for parameter in classifier.parameters())
    assert len(recipe.features) != len(PAPER_FEATURES) or count == PAPER_PARAMETERS, count
    assert classifier.spec.hidden == PAPER_HIDDEN
    return classifier


@dataclass(frozen=True)
class Epoch:
    """number: from 1. scores: on the evaluation rows. weights: copies of the parameters."""

    number: int
    scores: NodeScores
    weights: dict[str, Tensor]


def train(
    classifier: NodeClassifier,
    features: Tensor,
    accepted: Tensor,
    evaluate: Callable[[], NodeScores],
    generator: torch.Generator,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Epoch]:
    """Adam on binary cross-entropy, in place. features: (rows, F) float32. accepted: (rows,) bool.

    evaluate: scores of the classifier as it stands. report: called with batches done and in all.
    """
    optimiser = torch.optim.Adam(classifier.parameters(), lr=LEARNING_RATE, fused=True)
    labels = accepted.float()
    batches = math.ceil(len(labels) / BATCH)
    epochs = []
    for number in range(1, EPOCHS + 1):
        for done, rows in enumerate(torch.randperm(len(labels), generator=generator).split(BATCH)):
            loss = F.binary_cross_entropy_with_logits(classifier(features[rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if done % 256 == 0:
                report((number - 1) * batches + done, EPOCHS * batches)
        weights = {name: value.detach().clone() for name, value in classifier.state_dict().items()}
        epochs.append(Epoch(number, evaluate(), weights))
    return epochs


def choose_epoch(epochs: Sequence[Epoch], rule: str) -> Epoch:
    """By the smallest bce; or, for "recall", by the smallest theta among similar recalls; the earliest if equal."""
    if rule == "bce":
        return min(epochs, key=lambda epoch: epoch.scores.bce)
    best = max(epoch.scores.recall for epoch in epochs)
    similar = [epoch for epoch in epochs if epoch.scores.recall >= best - SIMILAR_RECALL]
    return min(similar, key=lambda epoch: epoch.scores.theta)
