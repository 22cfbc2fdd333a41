"""Products with wide weights, as oneDNN lays them out.

SGLang's own CPU engine packs weights too, for kernels that no wheel carries. What it does without them is MKL's
product, which on some processors divides few rows among threads so badly that 3 of them take longer than 8.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch

# Smaller ones lie in the caches, and to dispatch their product costs more than the layout saves.
LEAST = 512
# by the id of a weight: the weight, its version, and as oneDNN has it
_PACKED: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}


def wide(weight: torch.Tensor) -> bool:
    """Whether a weight (out, in) is worth packing."""
    return weight.dim() == 2 and min(weight.shape) >= LEAST and weight.dtype == torch.float32 and weight.is_cpu


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """(rows, in) float32 -> (rows, out) float32. weight: (out, in), packed anew when it has changed."""
    version = 0 if weight.is_inference() else weight._version
    known = _PACKED.get(id(weight))
    # the id of one that is gone may be another's
    if known is None or known[0]() is not weight or known[1] != version:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        known = _PACKED[id(weight)] = weakref.ref(weight), version, packed
    return torch.ops.mkldnn._linear_pointwise(rows, known[2], bias, "none", [], "")


def pack(model: torch.nn.Module) -> None:
    """Have the wide linear layers of a model of transformers multiply so."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and wide(layer.weight):
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: torch.nn.Linear, given: torch.Tensor) -> torch.Tensor:
    found = product(given.reshape(-1, given.shape[-1]), layer.weight, layer.bias)
    return found.view(*given.shape[:-1], -1)
