"""Every operation in plain float32 torch: short, reads like the paper, and is the judge of every faster one."""

from c2t_kernels.reference.attention import nonempty_blocks, tree_attention
from c2t_kernels.reference.chain import ChainState, score_chain
from c2t_kernels.reference.growth import GrownLayer, grow_layer
from c2t_kernels.reference.layout import TreeLayout, build_tree
from c2t_kernels.reference.masks import full_mask, pack_mask_bits
from c2t_kernels.reference.network import ScoringNetwork
from c2t_kernels.reference.packing import Packed, pack_ragged, scatter_ragged
from c2t_kernels.reference.stats import DraftStats, draft_stats
from c2t_kernels.reference.stopping import early_stop

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
