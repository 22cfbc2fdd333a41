"""Numerical operations of C2T: a Triton kernel for tensors on a GPU, its plain torch reference for all others.

Each operation is a package: `__init__.py` says what it computes and chooses a side by the device of a tensor,
`reference.py` is short float32 torch and the judge, `kernel.py` is Triton. The functions here have the arguments that
both sides take. A kernel.py takes more, mostly buffers to write into, as a captured CUDA graph needs them.

Triton is imported only where a tensor on a GPU arrives.
"""

from c2t_kernels.attention import tree_attention
from c2t_kernels.growth import GrownLayer, grow_layer
from c2t_kernels.masks import full_mask
from c2t_kernels.network import ScoringNetwork
from c2t_kernels.pack import Packed, pack_ragged, scatter_ragged
from c2t_kernels.score import ChainState, score_chain
from c2t_kernels.stats import DraftStats, draft_stats
from c2t_kernels.stop import early_stop
from c2t_kernels.tree_layout import TreeLayout, build_tree

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
