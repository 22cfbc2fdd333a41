"""The head as it is shipped: matrices in 8 bits with a scale per row, the LM head as `turn` and a list of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from c2t_plugin.errors import C2TError

WEIGHTS = Path(__file__).parent / "weights"
FILE = "eagle3-int8.safetensors"
SCALE = ".scale"
# the draft's vocabulary, under the name that the published file has for it
VOCABULARY = "words"
LEVELS = 127

Tensors = dict[str, torch.Tensor]


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [rows, columns] and float32 scales [rows] whose product is within half a scale of `weight`."""
    scale = weight.float().abs().amax(-1).clamp(min=1e-12) / LEVELS
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def pack(weights: Tensors, vocabulary: torch.Tensor) -> Tensors:
    """A head's weights as they are shipped; vectors stay float32."""
    packed = {VOCABULARY: vocabulary.to(torch.int32)}
    for name, weight in weights.items():
        if weight.ndim == 2:
            packed[name], packed[name + SCALE] = quantise(weight)
        else:
            packed[name] = weight.float()
    return packed


def unpack(packed: Tensors) -> tuple[Tensors, torch.Tensor]:
    """The inverse of pack(), rounded: float32 weights, and the draft's vocabulary (int64)."""
    weights = {
        name: tensor.float() for name, tensor in packed.items() if name != VOCABULARY and not name.endswith(SCALE)
    }
    for name in weights:
        if name + SCALE in packed:
            weights[name] *= packed[name + SCALE][:, None]
    return weights, packed[VOCABULARY].long()


def write_shipped(weights: Tensors, vocabulary: torch.Tensor, folder: Path, notes: dict[str, Any]) -> Path:
    """Write the shipped file; notes become its metadata, as text."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    metadata = {"format": "pt", **{key: str(value) for key, value in notes.items()}}
    save_file(
        {name: tensor.contiguous() for name, tensor in pack(weights, vocabulary).items()}, path, metadata=metadata
    )
    path.chmod(0o644)
    return path


def read_shipped(folder: Path = WEIGHTS) -> tuple[Tensors, torch.Tensor]:
    """Weights (float32) and vocabulary of the shipped head; C2TError if there is none."""
    path = folder / FILE
    if not path.is_file():
        raise C2TError(f"{path} is missing; `python -m benchmarks.pairs.smollm2 ship` writes it after training")
    return unpack(load_file(path))
