"""torch.ops.sgl_kernel.weight_packed_linear, with which SGLang multiplies by weights that are packed."""

from __future__ import annotations

import torch

from .linear import product

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("weight_packed_linear(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> Tensor")


def weight_packed_linear(
    mat1: torch.Tensor, mat2: torch.Tensor, bias: torch.Tensor | None, is_vnni: bool
) -> torch.Tensor:
    """(rows, in) float32 -> (rows, out) float32. mat2: (out, in), as it was loaded; `is_vnni` is of other types."""
    return product(mat1, mat2, bias)


_library.impl("weight_packed_linear", weight_packed_linear, "CPU")
