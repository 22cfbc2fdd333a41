"""The operations as Triton kernels, each judged by its twin in c2t_kernels.reference. Importing this needs Triton."""

from c2t_kernels.fused.attention import tree_attention
from c2t_kernels.fused.chain import score_chain
from c2t_kernels.fused.growth import grow_layer
from c2t_kernels.fused.layout import build_tree
from c2t_kernels.fused.masks import full_mask, pack_mask_bits
from c2t_kernels.fused.packing import pack_ragged, scatter_ragged
from c2t_kernels.fused.stats import draft_stats
from c2t_kernels.fused.stopping import early_stop

__all__ = [
    "build_tree",
    "draft_stats",
    "early_stop",
    "full_mask",
    "grow_layer",
    "pack_mask_bits",
    "pack_ragged",
    "scatter_ragged",
    "score_chain",
    "tree_attention",
]
