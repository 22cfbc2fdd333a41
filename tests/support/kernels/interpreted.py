"""Kernel tests run on the GPU where there is one, else in Triton's interpreter; unwritten outputs cannot pass."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.kernels import bounds

INTERPRET = not torch.cuda.is_available()

if INTERPRET:
    # Triton decides when a kernel is decorated, so the variable has to be there before fused modules are imported.
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules:
        # An engine's tests, collected earlier, import Triton without it; its own library functions (tl.sum, tl.max)
        # are decorated too, and the interpreter cannot call compiled ones.
        importlib.reload(sys.modules["triton.language.standard"])
        importlib.reload(sys.modules["triton.language"])


def pytest_collection_finish() -> None:
    """Tests of other folders must not inherit the variable, nor the servers that they start."""
    if INTERPRET:
        os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRET:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        bounds.watch(monkeypatch)


@pytest.fixture
def device() -> str:
    """Where the tensors of a test live: "cuda" if there is one, else "cpu" for the interpreter."""
    return "cpu" if INTERPRET else "cuda"


@pytest.fixture
def many() -> int:
    """Requests of a large batch. The interpreter runs one program after the other, so more would prove nothing there;
    what orders or numbers the requests of a batch within one program takes 257 everywhere."""
    return 17 if INTERPRET else 257


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite with what no operation writes: NaN, True, or an integer that no test computes."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max - 5)


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(make(*args, **kwargs))

    return made


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.empty and its kin return poison, so that an element that a kernel leaves unwritten fails the comparison."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    yield
