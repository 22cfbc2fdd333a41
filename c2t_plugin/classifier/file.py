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
# 64 hidden units take 5 KB; the lab may fit more.
MOST_BYTES = 64_000_000
# More than any feature is, and a logit that float32 holds with room.
LARGEST_FEATURE, LARGEST_LOGIT = 1e4, 1e30
# The same with confidences that are probabilities on chains, from `c2t calibrate`: for who plans by them.
CALIBRATED_NAME = "c2t_classifier_calibrated.safetensors"


def save_classifier(classifier: NodeClassifier, path: str | os.PathLike[str]) -> None:
    """Write weights and spec as one safetensors file, whole or not at all."""
    tensors = {name: value.detach().float().contiguous().cpu() for name, value in classifier.state_dict().items()}
    metadata = {"format": FORMAT, "version": VERSION, "spec": classifier.spec.to_json()}
    write_whole(Path(path), partial(save_file, tensors, metadata=metadata))


def load_classifier(path: str | os.PathLike[str]) -> NodeClassifier:
    """Read a classifier file, in eval mode, on the CPU.

    Raises ClassifierError if the file is missing, damaged, of another format or feature set, or holds NaN or numbers
    that overflow.
    """
    path = Path(path)
    # os.path, since Path raises where a name is too long or a folder may not be searched
    if not os.path.isfile(path):
        raise ClassifierError(f"classifier file not found: {path}; fit one with `c2t fit` or name another")
    if path.stat().st_size > MOST_BYTES:
        raise ClassifierError(f"{path} has more than {MOST_BYTES} bytes, no classifier does; name another")
    tensors, metadata = read_tensors(path, FORMAT, (VERSION,), "fit it again", ClassifierError)
    spec = ClassifierSpec.from_json(metadata.get("spec", ""))
    _check_tensors(path, tensors, spec)
    classifier = NodeClassifier(spec)
    classifier.load_state_dict(tensors)
    return classifier.eval().requires_grad_(False)


def _check_tensors(path: Path, found: Mapping[str, Tensor], spec: ClassifierSpec) -> None:
    """Before there is a network: one of the declared size may not fit into memory."""
    hidden, inputs = spec.hidden, len(spec.features)
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    wanted = {"hidden.weight": (hidden, inputs), "hidden.bias": (hidden,), "out.weight": (1, hidden), "out.bias": (1,)}
    if shapes != wanted:
        raise ClassifierError(f"{path} holds tensors {shapes}, its spec needs {wanted}; fit it again")
    odd = sorted(name for name, value in found.items() if value.dtype != torch.float32)
    if odd:
        raise ClassifierError(f"{path} holds something else than float32 in {', '.join(odd)}; fit it again")
    broken = sorted(name for name, value in found.items() if not torch.isfinite(value).all())
    if broken:
        raise ClassifierError(f"{path} holds NaN or infinity in {', '.join(broken)}; fit it again")
    size = {name: value.double().abs() for name, value in found.items()}
    shift, scale = (torch.tensor(each, dtype=torch.float64).abs() for each in (spec.shift, spec.scale))
    units = size["hidden.weight"] @ ((LARGEST_FEATURE + shift) / scale) + size["hidden.bias"]
    if not float(size["out.weight"] @ units + size["out.bias"]) <= LARGEST_LOGIT:
        raise ClassifierError(f"{path} holds numbers that overflow within the network; fit it again")
