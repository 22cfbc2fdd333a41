"""A tree of kept nodes as the tensors that an engine's verification reads."""

from __future__ import annotations

from torch import Tensor

from c2t_kernels.tree_layout.result import TreeLayout

__all__ = ["TreeLayout", "build_tree"]


def build_tree(
    parent_ids: Tensor,
    keep: Tensor,
    token_ids: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor,
    *,
    bucket: int,
) -> TreeLayout:
    """Lay out the kept nodes of each request, in the order of their slots.

    parent_ids: (bs, slots) int, slot of each node's parent, which comes before it; negative for a child of the root.
    keep: (bs, slots) bool, closed under ancestors: a kept node's parent is kept.
    token_ids: (bs, slots) int. root_tokens: (bs,) int. prefix_lens: (bs,) int, tokens before the root.
    bucket: places per request, root included. Nodes that do not fit are dropped, from the last slot back.

    On a GPU: one launch.
    """
    if keep.is_cuda:
        from c2t_kernels.tree_layout import kernel

        return kernel.build_tree(parent_ids, keep, token_ids, root_tokens, prefix_lens, bucket=bucket)
    from c2t_kernels.tree_layout import reference

    return reference.build_tree(parent_ids, keep, token_ids, root_tokens, prefix_lens, bucket=bucket)
