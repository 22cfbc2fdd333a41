"""The mask of a tree in the forms that engines read: over prefix and tree, and packed into bits."""

from __future__ import annotations

import torch
from torch import Tensor


def full_mask(
    tree_mask: Tensor, prefix_lens: Tensor, *, capacity: int, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Masks over prefix and tree of all requests, one after another: the engine's full form.

    tree_mask: (bs, bucket, bucket) bool. prefix_lens: (bs,) int.
    capacity: elements of the result; what does not fit is not written.
    counts: (bs,) int32, rows of each request's mask; the bucket if not given.
    Returns ((capacity,) bool, (bs + 1,) int64). Request i owns elements indptr[i] to indptr[i + 1], rows of prefix +
    counts elements each. Elements past indptr[-1] have no meaning.
    """
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


def pack_mask_bits(mask: Tensor) -> Tensor:
    """Eight mask elements to a byte, the first in the lowest bit: (..., n) bool -> (..., ceil(n / 8)) uint8.

    The last byte of a row is filled up with zeros. FlashInfer packs a request's mask as one row: it reads element
    i * kv_len + j of the flattened (rows, kv_len) mask, so flatten before packing.
    """
    missing = -mask.shape[-1] % 8
    bits = torch.nn.functional.pad(mask, (0, missing)).unflatten(-1, (-1, 8))
    weights = 2 ** torch.arange(8, device=mask.device)
    return (bits * weights).sum(dim=-1).to(torch.uint8)
