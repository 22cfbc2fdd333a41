"""Attention of the nodes under verification over a paged prefix and over their own tree."""

from __future__ import annotations

from torch import Tensor

__all__ = ["tree_attention"]


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
    """Softmax attention of packed new nodes: each sees its whole prefix and what its tree allows (DySpec appendix C).

    q: (rows, heads, head_dim); request i owns rows cu_nodes[i] to cu_nodes[i + 1], rows after the last are padding.
    k_new, v_new: (rows, kv_heads, head_dim), keys and values of the same nodes; heads is a multiple of kv_heads, and
        query head h reads key/value head h // (heads // kv_heads).
    k_pool, v_pool: (slots, kv_heads, head_dim), the paged cache with a page size of one token.
    cu_nodes: (requests + 1,) integer, from 0 on; a request may have no node.
    kv_indptr: (requests + 1,) integer; request i's prefix is in slots kv_indices[kv_indptr[i] : kv_indptr[i + 1]].
    mask: flat bool or uint8, from mask_indptr[i] on row-major (nodes, nodes) of request i, True where the row's node
        sees the column's; a request whose part is empty is a causal chain, as all are if mask is None.
    mask_indptr: (requests + 1,) integer, in elements of mask.
    scale: what q @ k is multiplied by; None means head_dim ** -0.5.

    Returns (rows, heads, head_dim) in q's dtype, computed in float32; padding rows, and nodes that see nothing, are 0.
    Raises ValueError if mask comes without mask_indptr, or if a part of it is not nodes squared.

    On a GPU: c2t_kernels.attention.kernel also takes max_nodes, out and launch; it leaves padding rows as they are.
    """
    if q.is_cuda:
        from c2t_kernels.attention import kernel

        return kernel.tree_attention(
            q, k_new, v_new, k_pool, v_pool, cu_nodes, kv_indptr, kv_indices, mask, mask_indptr, scale=scale
        )
    from c2t_kernels.attention import reference

    return reference.tree_attention(
        q, k_new, v_new, k_pool, v_pool, cu_nodes, kv_indptr, kv_indices, mask, mask_indptr, scale=scale
    )
