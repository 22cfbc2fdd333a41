"""A tree of kept nodes as the tensors that an engine's verification reads."""

from __future__ import annotations

from torch import Tensor

from c2t_kernels.tree_layout import reference
from c2t_kernels.tree_layout.reference import ORDERS, TreeLayout

__all__ = ["ORDERS", "TreeLayout", "build_tree"]


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
    """Lay out the kept nodes of each request.

    parent_ids: (bs, slots) int, slot of each node's parent, which comes before it; negative for a child of the root.
    keep: (bs, slots) bool, closed under ancestors: a kept node's parent is kept.
    token_ids: (bs, slots) int. root_tokens: (bs,) int. prefix_lens: (bs,) int, tokens before the root.
    bucket: places per request, root included. Nodes that do not fit are dropped, from the last slot back.
    order: "insertion" (slots), "depth_first" (a node's subtree follows it, children in slot order) or "heavy_path" (the
        same with the child of the largest subtree first, of equals the lower slot).

    On a GPU: c2t_kernels.tree_layout.kernel also takes out and scratch.
    """
    if keep.is_cuda:
        from c2t_kernels.tree_layout import kernel

        return kernel.build_tree(parent_ids, keep, token_ids, root_tokens, prefix_lens, bucket=bucket, order=order)
    return reference.build_tree(parent_ids, keep, token_ids, root_tokens, prefix_lens, bucket=bucket, order=order)
