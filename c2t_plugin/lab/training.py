"""Fitting a classifier to labelled nodes: the paper's optimiser and budget (C2T B.2), and the named recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from c2t_plugin.classifier import (
    EXTENDED_FEATURES,
    FEATURES,
    PAPER_FEATURES,
    PAPER_HIDDEN,
    ClassifierSpec,
    NodeClassifier,
)
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.scores import NodeScores
from c2t_plugin.lab.unfinished import Unfinished

EPOCHS = 10
BATCH = 1024
LEARNING_RATE = 1e-3
# Fine-tuning: learning rate and share of the prompts (C2T B.4).
FINE_TUNING_RATE = 1e-4
FINE_TUNING_SHARE = 0.1
# Epochs whose recall is within this of the best count as similar; the paper names no number.
SIMILAR_RECALL = 0.005
# What finished epochs left.
STATE = "epochs.pt"


@dataclass(frozen=True)
class FitRecipe:
    """How to make a classifier of nodes.

    features: names from FEATURES. standardise: to mean 0 and standard deviation 1 over the training rows.
    negatives_per_positive: rejected nodes kept per accepted one, None keeps all.
    choose: the epoch by "recall" first and then the smaller theta (C2T B.2), or by the smallest "bce".
    hidden: units of the hidden layer. chains: how often each node of the greedy chains is trained on beside those of
    the trees, 0 not at all; they are few, and serving chains sees no others.
    prior: after training on a sample of the negatives, shift the output by the logarithm of the share that was kept,
    so that a confidence is a probability among all nodes again (exact for a logistic output).
    decay: let the learning rate fall to 0 along half a cosine instead of keeping it.
    positive_weight: how often an accepted row counts in the loss, in place of leaving out rejected ones; `prior` undoes
    its effect on the output in the same way.
    monotone: weight of a penalty on logits that exceed the parent's, squared: no node is accepted more often than its
    parent. It needs all negatives, since a parent may be rejected. Where nodes are cut with all that is below them, the
    order along a path changes no decision, so only what is learnt can gain.
    """

    features: tuple[str, ...]
    standardise: bool
    negatives_per_positive: float | None
    choose: str
    hidden: int = PAPER_HIDDEN
    chains: int = 0
    prior: bool = False
    decay: bool = False
    positive_weight: float = 1.0
    monotone: float = 0.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.features if name not in FEATURES]
        if unknown or not self.features:
            raise C2TError(f"features must be some of {', '.join(FEATURES)}; got {', '.join(self.features) or 'none'}")
        ratio = self.negatives_per_positive
        if ratio is not None and not (math.isfinite(ratio) and ratio > 0):
            raise C2TError(f"negatives per positive must be a positive number, got {ratio}")
        if not (math.isfinite(self.positive_weight) and self.positive_weight > 0):
            raise C2TError(f"positive weight must be a positive number, got {self.positive_weight}")
        if not (math.isfinite(self.monotone) and self.monotone >= 0):
            raise C2TError(f"monotone must be a number of at least 0, got {self.monotone}")
        if self.monotone and ratio is not None:
            raise C2TError(f"monotone needs all negatives, got {ratio} per positive; leave one of the two out")
        if self.chains < 0:
            raise C2TError(f"chains must be at least 0, got {self.chains}")
        if self.hidden < 1:
            raise C2TError(f"hidden must be at least 1, got {self.hidden}")


# The paper names no ratio of negatives; 10 is what the project tried it with.
FIT_RECIPES = {
    "default": FitRecipe(("joint_log_prob", "entropy", "depth"), True, None, "bce"),
    "paper": FitRecipe(PAPER_FEATURES, False, 10.0, "recall"),
    "extended": FitRecipe(EXTENDED_FEATURES, True, None, "bce", chains=5, decay=True),
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
    """An untrained classifier, its scaling taken from features (rows, F). spec: further fields of ClassifierSpec."""
    shift, scale = torch.zeros(features.shape[1]), torch.ones(features.shape[1])
    if recipe.standardise:
        shift, scale = features.double().mean(0), features.double().std(0)
        # a constant feature carries nothing; dividing by 1 keeps it at 0
        scale = torch.where(scale > 0, scale, 1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NodeClassifier(
            ClassifierSpec(
                features=recipe.features,
                shift=tuple(shift.tolist()),
                scale=tuple(scale.tolist()),
                hidden=recipe.hidden,
                negatives_per_positive=recipe.negatives_per_positive,
                **spec,
            )
        )


@dataclass(frozen=True)
class Epoch:
    """number: from 1. scores: on the evaluation rows. weights: copies of the parameters."""

    number: int
    scores: NodeScores
    weights: dict[str, Tensor]


def train(
    classifier: nn.Module,
    features: Tensor,
    accepted: Tensor,
    evaluate: Callable[[], NodeScores],
    generator: torch.Generator,
    report: Callable[[int, int], None] = lambda done, total: None,
    *,
    learning_rate: float = LEARNING_RATE,
    decay: bool = False,
    positive_weight: float = 1.0,
    monotone: float = 0.0,
    parents: Tensor | None = None,
    unfinished: Unfinished | None = None,
) -> list[Epoch]:
    """Adam on binary cross-entropy, in place. features: (rows, F) float32. accepted: (rows,) bool.

    evaluate: scores of the classifier as it stands. report: called with batches done and in all.
    decay, positive_weight, monotone: see FitRecipe. parents: (rows,) int64 row of each row's parent, of itself below
    the root; needed for monotone only. unfinished: where finished epochs are kept and, after an interruption, taken
    from.
    """
    optimiser = torch.optim.Adam(classifier.parameters(), lr=learning_rate, fused=True)
    labels, weight = accepted.float(), torch.tensor(positive_weight)
    batches = math.ceil(len(labels) / BATCH)
    epochs = [] if unfinished is None else _go_on(unfinished, classifier, optimiser, generator)
    for number in range(len(epochs) + 1, EPOCHS + 1):
        for done, rows in enumerate(torch.randperm(len(labels), generator=generator).split(BATCH)):
            if decay:
                passed = ((number - 1) * batches + done) / (EPOCHS * batches)
                optimiser.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * passed)) / 2
            logits = classifier(features[rows])
            loss = F.binary_cross_entropy_with_logits(logits, labels[rows], pos_weight=weight)
            if parents is not None:
                above = classifier(features[parents[rows]])
                loss = loss + monotone * (logits - above).relu().square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if done % 256 == 0:
                report((number - 1) * batches + done, EPOCHS * batches)
        weights = {name: value.detach().clone() for name, value in classifier.state_dict().items()}
        epochs.append(Epoch(number, evaluate(), weights))
        if unfinished is not None:
            _keep(unfinished, epochs, optimiser, generator)
    return epochs


def _keep(
    unfinished: Unfinished, epochs: Sequence[Epoch], optimiser: torch.optim.Optimizer, generator: torch.Generator
) -> None:
    kept = {
        "epochs": [asdict(epoch) for epoch in epochs],
        "optimiser": optimiser.state_dict(),
        "generator": generator.get_state(),
    }
    unfinished.keep(STATE, lambda path: torch.save(kept, path))


def _go_on(
    unfinished: Unfinished, classifier: nn.Module, optimiser: torch.optim.Optimizer, generator: torch.Generator
) -> list[Epoch]:
    """The finished epochs; classifier, optimiser and generator as the last of them left them."""
    if not unfinished.file(STATE).is_file():
        return []
    kept = torch.load(unfinished.file(STATE), weights_only=True)
    epochs = [Epoch(each["number"], NodeScores(**each["scores"]), each["weights"]) for each in kept["epochs"]]
    classifier.load_state_dict(epochs[-1].weights)
    optimiser.load_state_dict(kept["optimiser"])
    generator.set_state(kept["generator"])
    return epochs


def choose_epoch(epochs: Sequence[Epoch], rule: str) -> Epoch:
    """By the smallest bce; or, for "recall", by the smallest theta among similar recalls; the earliest if equal."""
    if rule == "bce":
        return min(epochs, key=lambda epoch: epoch.scores.bce)
    best = max(epoch.scores.recall for epoch in epochs)
    similar = [epoch for epoch in epochs if epoch.scores.recall >= best - SIMILAR_RECALL]
    return min(similar, key=lambda epoch: epoch.scores.theta)
