"""What the tests of policies share: a table of probabilities and a classifier that can be followed by hand."""

from __future__ import annotations

import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier

A, B, C = 0, 1, 2
ROOT = (0.5, 0.3, 0.2)
AFTER = {A: (0.6, 0.3, 0.1), B: (0.1, 0.2, 0.7), C: (0.2, 0.1, 0.7)}
VOCAB = 4


def classifier_of(*features: str, weights: tuple[float, ...], bias: float = 0.0, top_m: int = 3) -> NodeClassifier:
    """sigmoid(weights . features + bias); one hidden unit a feature and sign, so that the ReLU loses nothing."""
    n = len(features)
    spec = ClassifierSpec(features=features, shift=(0.0,) * n, scale=(1.0,) * n, hidden=2 * n, top_m=top_m)
    model = NodeClassifier(spec)
    with torch.no_grad():
        model.hidden.weight.copy_(torch.cat([torch.eye(n), -torch.eye(n)]))
        model.hidden.bias.zero_()
        model.out.weight.copy_(torch.tensor([[*weights, *(-w for w in weights)]]))
        model.out.bias.fill_(bias)
    return model.eval().requires_grad_(False)


def by_rank(logits, row, ranks):
    """Tokens on the way to a node given by ranks."""
    path = ()
    for rank in ranks:
        order = sorted(range(len(logits(row, path))), key=lambda token: -logits(row, path)[token])
        path = (*path, order[rank])
    return path
