"""Numerical operations of C2T: a Triton kernel for tensors on a GPU, its plain torch reference for all others.

Each function here has the arguments that both sides take and is documented in c2t_kernels.reference. The kernels in
c2t_kernels.fused take more, mostly buffers to write into, as a captured CUDA graph needs them; each says so below.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

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


def _operations(tensor: Tensor) -> Any:
    """The package whose operations take this tensor. Triton is imported only where a tensor on a GPU arrives."""
    return import_module("c2t_kernels.fused" if tensor.is_cuda else "c2t_kernels.reference")


def draft_stats(logits: Tensor, top_m: int | Tensor, k: int = 1) -> DraftStats:
    """Entropy, most probable tokens and margin of each row's softmax: see c2t_kernels.reference.draft_stats.

    The kernel also takes out and workspace, and fixes the order of equal logits.
    """
    return _operations(logits).draft_stats(logits, top_m, k)


def score_chain(
    state: ChainState,
    network: ScoringNetwork,
    log_prob: Tensor,
    entropy: Tensor,
    margin: Tensor,
    beta: Tensor,
    depth: int,
) -> None:
    """One draft step of chain mode for a batch, in place: see c2t_kernels.reference.score_chain."""
    _operations(log_prob).score_chain(state, network, log_prob, entropy, margin, beta, depth)


def early_stop(
    confidence: Tensor,
    beta: Tensor | float,
    max_depth: Tensor | int,
    *,
    budget: Tensor | int | None = None,
    tiers: Tensor | None = None,
    next_token: Tensor | None = None,
) -> Tensor:
    """Kept length of each chain: see c2t_kernels.reference.early_stop.

    The kernel also takes out. A number in place of a tensor is one more launch, which fills a tensor with it.
    """
    return _operations(confidence).early_stop(
        confidence, beta, max_depth, budget=budget, tiers=tiers, next_token=next_token
    )


def pack_ragged(kept: Tensor, sources: Sequence[Tensor], *, capacity: int, pads: Sequence[float]) -> Packed:
    """Roots and kept draft tokens end to end: see c2t_kernels.reference.pack_ragged.

    The kernel also takes out and cu_seqlens.
    """
    return _operations(kept).pack_ragged(kept, sources, capacity=capacity, pads=pads)


def scatter_ragged(packed: Tensor, cu_seqlens: Tensor, width: int, *, fill: float) -> Tensor:
    """Inverse of pack_ragged for one tensor: see c2t_kernels.reference.scatter_ragged. The kernel also takes out."""
    return _operations(packed).scatter_ragged(packed, cu_seqlens, width, fill=fill)


def grow_layer(
    network: ScoringNetwork,
    joint_log_prob: Tensor,
    alive: Tensor,
    stats: DraftStats,
    beta: Tensor | float,
    depth: int,
    *,
    width: int,
    prune: bool = True,
    select: bool = True,
) -> GrownLayer:
    """One layer of a batch of trees: see c2t_kernels.reference.grow_layer.

    The kernel also takes out. A number in place of a tensor is one more launch, which fills a tensor with it.
    """
    return _operations(joint_log_prob).grow_layer(
        network, joint_log_prob, alive, stats, beta, depth, width=width, prune=prune, select=select
    )


def build_tree(
    parent_ids: Tensor,
    keep: Tensor,
    token_ids: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor,
    *,
    bucket: int,
    order: str = "insertion",
) -> TreeLayout:
    """Kept nodes as the tensors of verification: see c2t_kernels.reference.build_tree.

    The kernel also takes out and scratch.
    """
    return _operations(keep).build_tree(
        parent_ids, keep, token_ids, root_tokens, prefix_lens, bucket=bucket, order=order
    )


def full_mask(
    tree_mask: Tensor, prefix_lens: Tensor, *, capacity: int, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Masks over prefix and tree: see c2t_kernels.reference.full_mask. The kernel also takes out and indptr."""
    return _operations(tree_mask).full_mask(tree_mask, prefix_lens, capacity=capacity, counts=counts)


def pack_mask_bits(mask: Tensor) -> Tensor:
    """Eight mask elements to a byte: see c2t_kernels.reference.pack_mask_bits. The kernel also takes out."""
    return _operations(mask).pack_mask_bits(mask)


def tree_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    cu_nodes: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention of new nodes over a paged prefix and their tree: see c2t_kernels.reference.tree_attention.

    The kernel also takes max_nodes, out, launch and visits; it leaves padding rows as they are, where the reference
    writes 0.
    """
    return _operations(q).tree_attention(
        q, k_new, v_new, k_pool, v_pool, cu_nodes, kv_indptr, kv_indices, mask, mask_indptr, scale=scale
    )
