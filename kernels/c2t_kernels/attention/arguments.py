"""What the kernel of tree attention takes; its reference takes any head size."""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_kernels.checks import FLOATS, INTEGERS, check_tensor

HEAD_DIMS = (64, 128, 256)


def check(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    cu_nodes: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    mask: Tensor | None,
    mask_indptr: Tensor | None,
) -> None:
    """Raise unless the kernel takes these: TypeError for a dtype, else ValueError; each names its argument."""
    check_tensor("tree_attention: q", q, dtype=FLOATS, shape=(None, None, None))
    rows, heads, head_dim = q.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"tree_attention: q must have a head_dim of 64, 128 or 256, got {head_dim}")
    for name, tensor in (("k_new", k_new), ("v_new", v_new), ("k_pool", k_pool), ("v_pool", v_pool)):
        check_tensor(f"tree_attention: {name}", tensor, dtype=q.dtype, device=q.device)
    kv_heads, slots = (k_new.shape[1], k_pool.shape[0]) if k_new.dim() == k_pool.dim() == 3 else (None, None)
    if not kv_heads or heads % kv_heads != 0:
        raise ValueError(
            "tree_attention: k_new and k_pool must have a number of heads that divides q's"
            f" {heads}, got shapes {tuple(k_new.shape)} and {tuple(k_pool.shape)}"
        )
    for name, tensor, length in (
        ("k_new", k_new, rows),
        ("v_new", v_new, rows),
        ("k_pool", k_pool, slots),
        ("v_pool", v_pool, slots),
    ):
        shape = (length, kv_heads, head_dim)
        check_tensor(f"tree_attention: {name}", tensor, shape=shape)
    check_tensor("tree_attention: cu_nodes", cu_nodes, dtype=INTEGERS, shape=(None,), device=q.device)
    if cu_nodes.shape[0] < 1:
        raise ValueError("tree_attention: cu_nodes must have one entry more than there are requests, got none")
    ends = (cu_nodes.shape[0],)
    check_tensor("tree_attention: kv_indptr", kv_indptr, dtype=INTEGERS, shape=ends, device=q.device)
    check_tensor("tree_attention: kv_indices", kv_indices, dtype=INTEGERS, shape=(None,), device=q.device)
    if (mask is None) != (mask_indptr is None):
        raise ValueError("tree_attention: mask and mask_indptr come together or not at all")
    if mask is not None:
        check_tensor("tree_attention: mask", mask, dtype=(torch.bool, torch.uint8), shape=(None,), device=q.device)
        check_tensor("tree_attention: mask_indptr", mask_indptr, dtype=INTEGERS, shape=ends, device=q.device)
