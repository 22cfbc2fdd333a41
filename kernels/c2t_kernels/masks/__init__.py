"""The mask of a tree as engines read it: over prefix and tree."""

from __future__ import annotations

from torch import Tensor

__all__ = ["full_mask"]


def full_mask(
    tree_mask: Tensor, prefix_lens: Tensor, *, capacity: int, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Masks over prefix and tree of all requests, one after another: the engine's full form.

    tree_mask: (bs, bucket, bucket) bool. prefix_lens: (bs,) int.
    capacity: elements of the result; what does not fit is not written.
    counts: (bs,) int32, rows of each request's mask; the bucket if not given.
    Returns ((capacity,) bool, (bs + 1,) int64). Request i owns elements indptr[i] to indptr[i + 1], rows of prefix +
    counts elements each. Elements past indptr[-1] have no meaning.

    On a GPU: c2t_kernels.masks.kernel also takes out.
    """
    if tree_mask.is_cuda:
        from c2t_kernels.masks import kernel

        return kernel.full_mask(tree_mask, prefix_lens, capacity=capacity, counts=counts)
    from c2t_kernels.masks import reference

    return reference.full_mask(tree_mask, prefix_lens, capacity=capacity, counts=counts)
