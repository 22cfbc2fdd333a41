"""Keeps the stub from ever shadowing a real `sgl_kernel`, and checks arguments as the real ops do."""

from __future__ import annotations

import os

import torch

INT32 = (torch.int32,)
INT64 = (torch.int64,)
INDEX = (torch.int32, torch.int64)


def refuse_unless_asked_for() -> None:
    """Raise ImportError unless SGLANG_USE_CPU_ENGINE=1 and the machine has no CUDA device."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise ImportError(
            "this sgl_kernel is C2T's stub for CPU-only machines and SGLANG_USE_CPU_ENGINE is not 1: "
            "start the server with `python -m benchmarks.cpu_engine -- CMD`, or take its directory off PYTHONPATH"
        )
    if torch.cuda.is_available():
        raise ImportError(
            "this sgl_kernel is C2T's stub for CPU-only machines and CUDA is available here: "
            "take its directory off PYTHONPATH and use the sglang-kernel package, "
            "or hide the GPU with CUDA_VISIBLE_DEVICES=''"
        )


def check(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], dim: int | None = None) -> None:
    """Raise RuntimeError unless `tensor` is contiguous, of one of `dtypes` and, if `dim` is given, has that rank."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise RuntimeError(f"{name}: got dtype {tensor.dtype}, expected {expected}")
    if not tensor.is_contiguous():
        raise RuntimeError(f"{name}: got strides {tensor.stride()} for shape {list(tensor.shape)}, not contiguous")
    if dim is not None and tensor.dim() != dim:
        raise RuntimeError(f"{name}: got shape {tuple(tensor.shape)}, expected rank {dim}")


def check_size(name: str, tensor: torch.Tensor, numel: int) -> None:
    """Raise RuntimeError unless `tensor` has `numel` elements."""
    if tensor.numel() != numel:
        raise RuntimeError(f"{name}: got {tensor.numel()} elements, expected {numel}")


def refuse(op: str, **features: bool) -> None:
    """Raise RuntimeError if any of `features` is in use: the stub leaves them out, the real op has them."""
    used = [name for name, in_use in features.items() if in_use]
    if used:
        raise RuntimeError(f"{op}: the CPU stub does not support {', '.join(used)}")
