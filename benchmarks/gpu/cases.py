"""What a case of the standing GPU run is, and what all parts share; each part's cases are in a module of their own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def unchanged(*inputs: Any) -> tuple[Any, ...]:
    """The inputs as they are, for a provider that takes them so."""
    return inputs


@dataclass(frozen=True)
class Provider:
    """One way to compute it.

    run: called with what `prepare` makes of a case's inputs. It imports what it needs beside torch by itself.
    prepare: once for each set of inputs, outside of the time: planning, other layouts, masks built per step.
    captures: whether it can be captured in a CUDA graph.
    judge: its error against the reference's result where it computes only a part of it; else the case's own.
    absent: why it cannot run here, which its row then says; empty where it can.
    """

    name: str
    run: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] = unchanged
    captures: bool = True
    judge: Callable[[Any, Any], float] | None = None
    absent: str = ""


@dataclass(frozen=True)
class Case:
    """One shape. inputs: makes one set of arguments from a generator. reference: the judge, called with them.

    error: largest absolute difference of two results. bytes_moved: what the operation must read and write at least.
    input_bytes: of one set of arguments.
    """

    shape: Mapping[str, int | str]
    device: torch.device
    inputs: Callable[[torch.Generator], tuple[Any, ...]]
    reference: Callable[..., Any]
    error: Callable[[Any, Any], float]
    tolerance: float
    bytes_moved: int
    input_bytes: int
    providers: Sequence[Provider]


def needs(package: str, provider: Provider, device: torch.device | None = None) -> Provider:
    """The provider, or in its place one that says what is missing: a rival must not vanish from the table.

    package: what it needs beside torch. device: where the case is, if the provider can run on a GPU alone.
    """
    if find_spec(package) is None:
        return replace(provider, absent=f"{package} is not installed")
    if device is not None and device.type != "cuda":
        return replace(provider, absent="needs a GPU")
    return provider


def fused_or_reference(device: torch.device) -> str:
    """Which of ours is timed: the kernels on a GPU and in Triton's interpreter, else the reference."""
    return "fused" if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1" else "reference"


def operation(kind: str, package: str, name: str) -> Any:
    """`name` of c2t_kernels.<package>: its kernel if kind is "fused", its reference if kind is "reference"."""
    module = {"fused": "kernel", "reference": "reference"}[kind]
    return getattr(import_module(f"c2t_kernels.{package}.{module}"), name)


def largest_error(expected: Any, found: Any) -> float:
    """Largest absolute difference of two tensors, or of two sequences of them.

    Infinite if shapes differ, or anything but a float does. Equal infinities and NaN beside NaN are no difference.
    """
    if not isinstance(expected, Tensor):
        return max(largest_error(mine, theirs) for mine, theirs in zip(expected, found, strict=True))
    if expected.shape != found.shape:
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, found.to(expected.dtype)) else math.inf
    a, b = expected.double(), found.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return (
        float((a - b).masked_fill(same, 0.0).abs().nan_to_num(nan=math.inf, posinf=math.inf).max())
        if a.numel()
        else 0.0
    )
