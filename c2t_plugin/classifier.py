"""The classifier of C2T: features of a draft token to a confidence, and the file it lives in (C2T 4.1, B)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from c2t_kernels.network import MAX_HIDDEN, ScoringNetwork
from c2t_plugin.errors import ClassifierError
from c2t_plugin.features import FEATURES, PAPER_FEATURES, NodeStats, node_features
from c2t_plugin.output import write_whole
from c2t_plugin.tensor_file import read_tensors

FORMAT = "c2t-classifier"
VERSION = "1"
PAPER_HIDDEN = 48
PAPER_PARAMETERS = 241
FILE_NAME = "c2t_classifier.safetensors"
# The same with confidences that are probabilities on chains, from `c2t calibrate`: for who plans by them.
CALIBRATED_NAME = "c2t_classifier_calibrated.safetensors"


@dataclass(frozen=True)
class ClassifierSpec:
    """All that decides what a confidence, and so a beta, means. It travels in the classifier file.

    features: names from FEATURES, in order. Feature i enters as (value - shift[i]) / scale[i].
    depth_origin: the number that a root's child has as its depth, 0 or 1 (the paper uses both).
    top_m: how many of the largest probabilities the entropy sums over.
    negatives_per_positive: of the training rows; None if all negatives were used.
    suggested_beta: threshold for users who set none, in [0, 1].
    pair: the draft/target pair it was fitted on, e.g. {"target": ..., "draft": ..., "draft_vocab_size": ...}.
    training: provenance and held-out scores.
    """

    features: tuple[str, ...] = PAPER_FEATURES
    shift: tuple[float, ...] = (0.0, 0.0, 0.0)
    scale: tuple[float, ...] = (1.0, 1.0, 1.0)
    hidden: int = PAPER_HIDDEN
    depth_origin: int = 1
    top_m: int = 1000
    negatives_per_positive: float | None = None
    suggested_beta: float = 0.5
    pair: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [name for name in self.features if name not in FEATURES]
        if unknown or not self.features or len(set(self.features)) != len(self.features):
            raise ClassifierError(
                f"classifier features {list(self.features)}: this build computes {list(FEATURES)}, each at most once"
            )
        if not len(self.features) == len(self.shift) == len(self.scale):
            raise ClassifierError("classifier features, shift and scale must have one entry per feature")
        if not all(math.isfinite(x) for x in (*self.shift, *self.scale)) or 0.0 in self.scale:
            raise ClassifierError(f"classifier shift {self.shift} and scale {self.scale} must be finite, scale not 0")
        if self.hidden < 1 or self.top_m < 1 or self.depth_origin not in (0, 1):
            raise ClassifierError(
                f"classifier needs hidden >= 1, top_m >= 1 and depth_origin 0 or 1, got hidden {self.hidden}, "
                f"top_m {self.top_m}, depth_origin {self.depth_origin}"
            )
        if not 0.0 <= self.suggested_beta <= 1.0:
            raise ClassifierError(f"classifier suggested_beta must be in [0, 1], got {self.suggested_beta}")

    @classmethod
    def from_json(cls, text: str) -> ClassifierSpec:
        """Inverse of to_json. Unknown or missing keys raise ClassifierError."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ClassifierError(f"classifier spec is not valid JSON: {error}") from error
        known = {item.name for item in fields(cls)}
        if not isinstance(raw, dict) or set(raw) != known:
            found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise ClassifierError(
                f"classifier spec must have exactly the keys {sorted(known)}, found {found}; refit it"
            )
        tuples = {name: tuple(raw[name]) for name in ("features", "shift", "scale")}
        return cls(**{**raw, **tuples})

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class NodeClassifier(nn.Module):
    """Two-layer feed-forward network, ReLU, sigmoid (C2T 4.1): 3-48-1 has 241 parameters."""

    shift: Tensor
    scale: Tensor

    def __init__(self, spec: ClassifierSpec) -> None:
        super().__init__()
        self.spec = spec
        self.hidden = nn.Linear(len(spec.features), spec.hidden)
        self.out = nn.Linear(spec.hidden, 1)
        self.register_buffer("shift", torch.tensor(spec.shift, dtype=torch.float32), persistent=False)
        self.register_buffer("scale", torch.tensor(spec.scale, dtype=torch.float32), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Logit of acceptance: (..., n_features) float32, unscaled -> (...) float32."""
        scaled = (features - self.shift) / self.scale
        return self.out(torch.relu(self.hidden(scaled))).squeeze(-1)

    def confidence(self, stats: NodeStats) -> Tensor:
        """Confidence in [0, 1] of each node: stats of shape (...) -> (...) float32; NaN where stats are not finite."""
        shifted = stats._replace(depth=stats.depth + (self.spec.depth_origin - 1))
        return torch.sigmoid(self(node_features(self.spec.features, shifted)))

    def network(self, device: torch.device | str) -> ScoringNetwork:
        """This classifier as the kernels take it, on that device. Raises ClassifierError if it is too wide for them."""
        if self.spec.hidden > MAX_HIDDEN:
            raise ClassifierError(
                f"the classifier has {self.spec.hidden} hidden units, an engine takes at most {MAX_HIDDEN}: "
                "fit it with fewer (c2t fit --hidden)"
            )

        def as_tensor(weight: Tensor) -> Tensor:
            return weight.detach().float().contiguous().to(device)

        return ScoringNetwork(
            self.spec.features,
            as_tensor(self.shift),
            as_tensor(self.scale),
            as_tensor(self.hidden.weight),
            as_tensor(self.hidden.bias),
            as_tensor(self.out.weight.flatten()),
            as_tensor(self.out.bias),
            self.spec.depth_origin,
        )


def save_classifier(classifier: NodeClassifier, path: str | os.PathLike[str]) -> None:
    """Write weights and spec as one safetensors file, whole or not at all."""
    tensors = {name: value.detach().float().contiguous().cpu() for name, value in classifier.state_dict().items()}
    metadata = {"format": FORMAT, "version": VERSION, "spec": classifier.spec.to_json()}
    write_whole(Path(path), partial(save_file, tensors, metadata=metadata))


def load_classifier(path: str | os.PathLike[str]) -> NodeClassifier:
    """Read a classifier file, in eval mode, on the CPU.

    Raises ClassifierError if the file is missing, damaged, of another format or feature set, or holds NaN.
    """
    path = Path(path)
    if not path.is_file():
        raise ClassifierError(f"classifier file not found: {path}; fit one with `c2t fit` or name another")
    tensors, metadata = read_tensors(path, FORMAT, (VERSION,), "fit it again", ClassifierError)
    spec = ClassifierSpec.from_json(metadata.get("spec", ""))
    classifier = NodeClassifier(spec)
    _check_tensors(path, tensors, classifier.state_dict())
    classifier.load_state_dict(tensors)
    return classifier.eval().requires_grad_(False)


def _check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    wanted = {name: tuple(value.shape) for name, value in expected.items()}
    if shapes != wanted:
        raise ClassifierError(f"{path} holds tensors {shapes}, its spec needs {wanted}; fit it again")
    broken = sorted(name for name, value in found.items() if not torch.isfinite(value).all())
    if broken:
        raise ClassifierError(f"{path} holds NaN or infinity in {', '.join(broken)}; fit it again")
