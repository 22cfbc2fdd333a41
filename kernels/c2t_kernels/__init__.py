"""Numerical operations of C2T: a Triton kernel for tensors on a GPU, its plain torch reference for all others.

Each operation is a package: `__init__.py` says what it computes and chooses a side by the device of a tensor,
`reference.py` is short float32 torch and the judge, `kernel.py` is Triton. The functions here have the arguments that
both sides take. A kernel.py takes more, mostly buffers to write into, as a captured CUDA graph needs them.

An operation is imported when it is asked for, Triton only where a tensor on a GPU arrives, and a reference that nobody
else needs only where another one does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from c2t_kernels.attention import tree_attention as tree_attention
    from c2t_kernels.clip import clip_trees as clip_trees
    from c2t_kernels.growth import GrownLayer as GrownLayer
    from c2t_kernels.growth import grow_layer as grow_layer
    from c2t_kernels.masks import full_mask as full_mask
    from c2t_kernels.network import ScoringNetwork as ScoringNetwork
    from c2t_kernels.pack import Packed as Packed
    from c2t_kernels.pack import pack_ragged as pack_ragged
    from c2t_kernels.pack import scatter_ragged as scatter_ragged
    from c2t_kernels.score import ChainState as ChainState
    from c2t_kernels.score import score_chain as score_chain
    from c2t_kernels.spare import fill_spare_rows as fill_spare_rows
    from c2t_kernels.stats import DraftStats as DraftStats
    from c2t_kernels.stats import draft_stats as draft_stats
    from c2t_kernels.step import score_step as score_step
    from c2t_kernels.stop import early_stop as early_stop
    from c2t_kernels.tree_layout import TreeLayout as TreeLayout
    from c2t_kernels.tree_layout import build_tree as build_tree

# name -> the operation that it is of
_HOMES = {
    "ChainState": "score",
    "DraftStats": "stats",
    "GrownLayer": "growth",
    "Packed": "pack",
    "ScoringNetwork": "network",
    "TreeLayout": "tree_layout",
    "build_tree": "tree_layout",
    "clip_trees": "clip",
    "draft_stats": "stats",
    "early_stop": "stop",
    "fill_spare_rows": "spare",
    "full_mask": "masks",
    "grow_layer": "growth",
    "pack_ragged": "pack",
    "scatter_ragged": "pack",
    "score_chain": "score",
    "score_step": "step",
    "tree_attention": "attention",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # asked for once: from then on the module has it
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
