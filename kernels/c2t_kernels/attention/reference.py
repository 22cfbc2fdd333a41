"""Attention of the nodes under verification over a paged prefix and over their own tree, request by request."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


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
    """c2t_kernels.tree_attention, which says what it computes, in float32 torch."""
    if (mask is None) != (mask_indptr is None):
        raise ValueError("tree_attention: mask and mask_indptr come together or not at all")
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // k_new.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for i in range(len(cu_nodes) - 1):
        nodes = slice(int(cu_nodes[i]), int(cu_nodes[i + 1]))
        slots = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
        keys = torch.cat([k_pool[slots], k_new[nodes]]).float().repeat_interleave(group, dim=1)
        values = torch.cat([v_pool[slots], v_new[nodes]]).float().repeat_interleave(group, dim=1)
        # every node sees the whole prefix
        seen = pad(_seen_nodes(i, nodes.stop - nodes.start, q.device, mask, mask_indptr), (len(slots), 0), value=True)
        scores = torch.einsum("nhd,khd->hnk", q[nodes].float(), keys) * scale
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        # the softmax of a node that sees nothing is 0/0
        weights = weights.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)
        out[nodes] = torch.einsum("hnk,khd->nhd", weights, values)
    return out.to(q.dtype)


def _seen_nodes(i: int, nodes: int, device: torch.device, mask: Tensor | None, mask_indptr: Tensor | None) -> Tensor:
    """(nodes, nodes) bool: which of its request's nodes each node sees."""
    chain = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
    if mask is None or mask_indptr is None:
        return chain
    part = mask[int(mask_indptr[i]) : int(mask_indptr[i + 1])]
    if len(part) == 0:
        return chain
    if len(part) != nodes * nodes:
        raise ValueError(f"tree_attention: request {i} has {nodes} nodes and {len(part)} mask elements, not {nodes**2}")
    return part.reshape(nodes, nodes) != 0
