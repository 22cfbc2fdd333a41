"""Cases of the standing GPU run: what one is, and those of draft_stats. Other parts are in modules of their own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from c2t_kernels import DraftStats, reference


@dataclass(frozen=True)
class Provider:
    """One way to compute it. captures: whether it can be captured in a CUDA graph."""

    name: str
    run: Callable[..., Any]
    captures: bool = True


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


TOP_M, TOP_K = 1000, 10


def stats_cases(device: torch.device, dry_run: bool) -> Iterator[Case]:
    """draft_stats against torch's own softmax, topk(1000) and entropy, and against topk(1000) alone."""
    kind = fused_or_reference(device)
    ours = operation(kind, "stats", "draft_stats")
    batches, vocabs = ((1, 3), (1500,)) if dry_run else ((1, 8, 32, 64, 128, 256), (32_000, 128_256, 151_936))
    for vocab in vocabs:
        for dtype in (torch.bfloat16, torch.float32):
            for batch in batches:
                size = batch * vocab * dtype.itemsize
                yield Case(
                    shape={"bs": batch, "V": vocab, "dtype": str(dtype).removeprefix("torch.")},
                    device=device,
                    inputs=_logits(batch, vocab, dtype, device, kind),
                    reference=lambda logits, _: reference.draft_stats(logits, TOP_M, TOP_K),
                    error=_stats_error,
                    # float32 sums of up to 151,936 terms in another order
                    tolerance=2e-4,
                    bytes_moved=size,
                    input_bytes=size,
                    providers=(
                        Provider("fused", lambda logits, buffers: ours(logits, TOP_M, TOP_K, **buffers)),
                        Provider("torch", lambda logits, _: reference.draft_stats(logits, TOP_M, TOP_K)),
                    ),
                )


def _logits(
    batch: int, vocab: int, dtype: torch.dtype, device: torch.device, kind: str
) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """Logits, and the buffers that the kernel writes into."""

    def make(generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        logits = (torch.randn(batch, vocab, generator=generator, device=device) * 3).to(dtype)
        if kind == "reference":
            return logits, {}
        ids = torch.zeros(batch, TOP_K, dtype=torch.int64, device=device)
        out = DraftStats(ids, ids.float(), ids[:, 0].float(), ids[:, 1].float())
        workspace = operation(kind, "stats", "DraftStatsWorkspace").create(batch, device)
        return logits, {"out": spoiled(out), "workspace": workspace}

    return make


def _stats_error(expected: Any, found: Any) -> float:
    names = ("log_probs", "entropy", "margin")
    return max(float((getattr(expected, name) - getattr(found, name)).abs().max()) for name in names)


def fused_or_reference(device: torch.device) -> str:
    """Which of ours is timed: the kernels on a GPU and in Triton's interpreter, else the reference."""
    return "fused" if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1" else "reference"


def operation(kind: str, module: str, name: str) -> Any:
    """c2t_kernels.<kind>.<module>.<name>; kind is "fused" or "reference"."""
    return getattr(import_module(f"c2t_kernels.{kind}.{module}"), name)


def spoiled(result: Any) -> Any:
    """Buffers of the shapes and dtypes of a result's tensors, with nothing in them that could be right."""
    if not isinstance(result, Tensor):
        return type(result)(*map(spoiled, result))
    return ~result if result.dtype == torch.bool else torch.full_like(result, -77)


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
