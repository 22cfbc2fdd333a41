"""Numerical operations of C2T: a Triton kernel for tensors on a GPU, its plain torch reference for all others.

Each function here has the arguments that both sides take, with the signature and documentation of its reference. The
kernels in c2t_kernels.fused take more, mostly buffers to write into, as a captured CUDA graph needs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from c2t_kernels import reference
from c2t_kernels.reference import (
    ChainState,
    DraftStats,
    GrownLayer,
    Packed,
    ScoringNetwork,
    TreeLayout,
    nonempty_blocks,
)

__all__ = [
    "ChainState",
    "DraftStats",
    "GrownLayer",
    "Packed",
    "ScoringNetwork",
    "TreeLayout",
    "build_tree",
    "draft_stats",
    "early_stop",
    "full_mask",
    "grow_layer",
    "nonempty_blocks",
    "pack_mask_bits",
    "pack_ragged",
    "scatter_ragged",
    "score_chain",
    "tree_attention",
]

P = ParamSpec("P")
R = TypeVar("R")


def _by_device(judge: Callable[P, R], argument: str, on_a_gpu: str) -> Callable[P, R]:
    """The operation that `judge` is the reference of, from the package that fits the device of one of its arguments.

    argument: the tensor that decides. on_a_gpu: in what the kernel differs, for the documentation.
    """
    place = list(inspect.signature(judge).parameters).index(argument)

    @wraps(judge)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor: Any = args[place] if place < len(args) else kwargs[argument]
        # Triton is imported only where a tensor on a GPU arrives
        package = import_module("c2t_kernels.fused" if tensor.is_cuda else "c2t_kernels.reference")
        chosen: Callable[P, R] = getattr(package, judge.__name__)
        return chosen(*args, **kwargs)

    operation.__doc__ = f"{judge.__doc__}\n    On a GPU: {on_a_gpu}\n    "
    return operation


draft_stats = _by_device(
    reference.draft_stats, "logits", "c2t_kernels.fused also takes out and workspace; equal logits come in id order."
)
score_chain = _by_device(reference.score_chain, "log_prob", "one launch.")
early_stop = _by_device(
    reference.early_stop,
    "confidence",
    "c2t_kernels.fused also takes out. A number in place of a tensor is one more launch, which fills a tensor with it.",
)
pack_ragged = _by_device(reference.pack_ragged, "kept", "c2t_kernels.fused also takes out and cu_seqlens.")
scatter_ragged = _by_device(reference.scatter_ragged, "packed", "c2t_kernels.fused also takes out.")
grow_layer = _by_device(
    reference.grow_layer,
    "joint_log_prob",
    "c2t_kernels.fused also takes out. A number for beta is one more launch, which fills a tensor with it.",
)
build_tree = _by_device(reference.build_tree, "keep", "c2t_kernels.fused also takes out and scratch.")
full_mask = _by_device(reference.full_mask, "tree_mask", "c2t_kernels.fused also takes out and indptr.")
pack_mask_bits = _by_device(reference.pack_mask_bits, "mask", "c2t_kernels.fused also takes out.")
tree_attention = _by_device(
    reference.tree_attention,
    "q",
    "c2t_kernels.fused also takes max_nodes, out, launch and visits; it leaves padding rows as they are.",
)
