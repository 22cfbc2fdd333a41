"""Checks of arguments that every operation makes before it launches anything; each error names the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: Any,
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    shape: Sequence[int | None] | None = None,
    device: torch.device | None = None,
    contiguous_last: bool = True,
) -> None:
    """Raise unless `tensor` is what the operation can take; whatever is None is not checked.

    name: what the error calls it, e.g. "score_chain: entropy".
    dtype: one, or any of several.
    shape: one entry per dimension, None where any size will do.
    device: where the operation's other tensors are.
    contiguous_last: the elements of the last dimension must be neighbours in memory; rows may have any stride.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or stride.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if dtypes is not None and tensor.dtype not in dtypes:
        expected = " or ".join(str(item).removeprefix("torch.") for item in dtypes)
        raise TypeError(f"{name} must be {expected}, got {str(tensor.dtype).removeprefix('torch.')}")
    if shape is not None and not _fits(tensor.shape, shape):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape ({expected}), got {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if contiguous_last and tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got strides {tensor.stride()}; call .contiguous()"
        )


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise TypeError unless `value` is an int (no bool), ValueError unless low <= value <= high."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def check_fraction(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a number, ValueError unless it is in [0, 1]; NaN and infinity are not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise ValueError(f"{name} must be a number in [0, 1], got {value}")


def output(
    name: str, given: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """The caller's buffer, checked, or a new one without content: contiguous, of this very shape, dtype and device."""
    if given is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    check_tensor(name, given, dtype=dtype, shape=tuple(shape), device=torch.device(device))
    if not given.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {given.stride()}")
    return given


def per_request(
    name: str, value: Tensor | float, rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, int]:
    """A number, a 1-element tensor or one element per row, as (tensor, stride between rows).

    A Python float must be in [0, 1], an int must not be negative; what a tensor holds cannot be checked without waiting
    for the device.
    """
    if not isinstance(value, Tensor):
        if dtype == torch.float32:
            check_fraction(name, value)
        else:
            check_int(name, value, 0)
        return torch.full((1,), value, dtype=dtype, device=device), 0
    check_tensor(name, value, dtype=dtype, device=device, contiguous_last=False)
    if value.numel() == 1:
        return value, 0
    check_tensor(name, value, shape=(rows,), contiguous_last=False)
    return value, value.stride(0)


def _fits(found: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(found) == len(wanted) and all(w is None or w == f for f, w in zip(found, wanted, strict=True))
