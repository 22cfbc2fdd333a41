"""The file that a classifier lives in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from c2t_plugin.classifier.network import NodeClassifier
from c2t_plugin.classifier.spec import ClassifierSpec
from c2t_plugin.errors import ClassifierError
from c2t_plugin.output import write_whole
from c2t_plugin.tensor_file import read_tensors

FORMAT = "c2t-classifier"
VERSION = "1"
FILE_NAME = "c2t_classifier.safetensors"
# The same with confidences that are probabilities on chains, from `c2t calibrate`: for who plans by them.
CALIBRATED_NAME = "c2t_classifier_calibrated.safetensors"


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
