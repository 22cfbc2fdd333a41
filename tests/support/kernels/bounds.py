"""Triton's interpreter made to refuse what a GPU may refuse: a load or store outside of the tensors of its launch.

The interpreter reads whatever lies at an address, so that a kernel that reads one element before its input passes on a
CPU, where nobody uses the value, and ends the process on a GPU, where the page may be nobody's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


class OutOfBoundsError(AssertionError):
    """A kernel touched memory that none of its arguments has."""


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor, and the one behind its last element; strides of ours do not fall."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def check(addresses: np.ndarray, mask: np.ndarray, extents: list[tuple[int, int]]) -> None:
    """Raises OutOfBoundsError if a live address lies in none of the extents."""
    live = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
    if not live.size:
        return
    inside = np.zeros(live.shape, bool)
    for first, end in extents:
        inside |= (live >= np.uint64(first)) & (live < np.uint64(end))
    if not inside.all():
        near = min(extents, key=lambda each: abs(int(live[~inside][0]) - each[0]))
        off = int(live[~inside][0]) - near[0]
        said = f"{(~inside).sum()} of {live.size} addresses lie in no argument"
        raise OutOfBoundsError(f"{said}, the first {off} bytes from the nearest one's begin")


def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every launch in the interpreter is checked."""
    from triton.runtime import interpreter

    extents: list[tuple[int, int]] = []
    launch, load, store = (
        interpreter.GridExecutor._init_args_hst,
        interpreter.InterpreterBuilder.create_masked_load,
        interpreter.InterpreterBuilder.create_masked_store,
    )

    def launched(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, named = launch(self, args_dev, kwargs)
        tensors = [each for each in (*args, *named.values()) if isinstance(each, torch.Tensor) and each.numel()]
        extents[:] = map(_extent, tensors)
        return args, named

    def loaded(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        check(ptrs.data, mask.data, extents)
        return load(self, ptrs, mask, *others)

    def stored(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        check(ptrs.data, mask.data, extents)
        return store(self, ptrs, value, mask, *others)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", launched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", loaded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", stored)
