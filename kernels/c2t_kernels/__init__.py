"""Numerical operations of C2T: a Triton kernel for tensors on a GPU, its plain torch reference for all others.

Each operation is a package: `__init__.py` says what it computes and chooses a side by the device of a tensor,
`reference.py` is short float32 torch and the judge, `kernel.py` is Triton. The functions here have the arguments that
both sides take. A kernel.py takes more, mostly buffers to write into, as a captured CUDA graph needs them.

An operation is imported when it is asked for, Triton only where a tensor on a GPU arrives.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from c2t_kernels.attention import tree_attention
    from c2t_kernels.growth import GrownLayer, grow_layer
    from c2t_kernels.masks import full_mask
    from c2t_kernels.network import ScoringNetwork
    from c2t_kernels.pack import Packed, pack_ragged, scatter_ragged
    from c2t_kernels.score import ChainState, score_chain
    from c2t_kernels.stats import DraftStats, draft_stats
    from c2t_kernels.stop import early_stop
    from c2t_kernels.tree_layout import TreeLayout, build_tree

# name -> the operation that it is of
_HOMES = {
    "ChainState": "score",
    "DraftStats": "stats",
    "GrownLayer": "growth",
    "Packed": "pack",
    "ScoringNetwork": "network",
    "TreeLayout": "tree_layout",
    "build_tree": "tree_layout",
    "draft_stats": "stats",
    "early_stop": "stop",
    "full_mask": "masks",
    "grow_layer": "growth",
    "pack_ragged": "pack",
    "scatter_ragged": "pack",
    "score_chain": "score",
    "tree_attention": "attention",
}

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
    "pack_ragged",
    "scatter_ragged",
    "score_chain",
    "tree_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # asked for once: from then on the module has it
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
