"""The mask of a tree as engines read it: over prefix and tree."""

from __future__ import annotations

import torch
from torch import Tensor


def full_mask(
    tree_mask: Tensor, prefix_lens: Tensor, *, capacity: int, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """c2t_kernels.full_mask, which says what it computes, in float32 torch."""
    sizes = [tree_mask.shape[1]] * len(tree_mask) if counts is None else counts.tolist()
    parts = [torch.zeros(0, dtype=torch.bool, device=tree_mask.device)]
    indptr = [0]
    for tree, prefix, size in zip(tree_mask, prefix_lens.tolist(), sizes, strict=True):
        rows = torch.cat([tree.new_ones(size, prefix), tree[:size, :size]], dim=1)
        parts.append(rows.flatten())
        indptr.append(indptr[-1] + rows.numel())
    flat = torch.cat(parts)[:capacity]
    mask = torch.zeros(capacity, dtype=torch.bool, device=tree_mask.device)
    mask[: len(flat)] = flat
    return mask, torch.tensor(indptr, device=tree_mask.device)
