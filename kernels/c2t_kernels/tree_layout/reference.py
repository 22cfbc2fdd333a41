"""A tree of kept nodes as the tensors that an engine's verification reads."""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_kernels.tree_layout.result import TreeLayout

ROOT, PAD = -1, -2  # what TreeLayout.slots says of nodes that are no slot


def build_tree(
    parent_ids: Tensor,
    keep: Tensor,
    token_ids: Tensor,
    root_tokens: Tensor,
    prefix_lens: Tensor,
    *,
    bucket: int,
) -> TreeLayout:
    """c2t_kernels.build_tree, which says what it computes, in float32 torch."""
    bs, device = len(keep), keep.device
    places = torch.zeros(bs, bucket, dtype=torch.int64)
    layout = TreeLayout(
        draft_tokens=places.clone(),
        positions=prefix_lens.cpu().long()[:, None].repeat(1, bucket),
        retrieve_index=torch.arange(bs * bucket).view(bs, bucket),
        retrieve_next_token=places - 1,
        retrieve_next_sibling=places - 1,
        parents=(places - 1).int(),
        slots=torch.full((bs, bucket), PAD, dtype=torch.int32),
        counts=torch.zeros(bs, dtype=torch.int32),
        mask=torch.eye(bucket, dtype=torch.bool).repeat(bs, 1, 1),
    )
    for i in range(bs):
        kept = keep[i].nonzero().flatten().tolist()[: bucket - 1]
        parent_of = {slot: max(int(parent_ids[i, slot]), ROOT) for slot in kept}
        nodes = [ROOT, *kept]
        place_of = {slot: place for place, slot in enumerate(nodes)}
        layout.counts[i] = len(nodes)
        for place, slot in enumerate(nodes):
            layout.slots[i, place] = slot
            layout.draft_tokens[i, place] = root_tokens[i] if slot == ROOT else token_ids[i, slot]
            if slot != ROOT:
                parent = place_of[parent_of[slot]]
                layout.parents[i, place] = parent
                layout.positions[i, place] = layout.positions[i, parent] + 1
                layout.mask[i, place] |= layout.mask[i, parent]
        _link(layout, i, len(nodes))
    return TreeLayout(*(tensor.to(device) for tensor in layout))


def _link(layout: TreeLayout, i: int, count: int) -> None:
    """First child and next sibling of every node of tree i."""
    for place in range(count - 1, 0, -1):
        parent = int(layout.parents[i, place])
        layout.retrieve_next_sibling[i, place] = layout.retrieve_next_token[i, parent]
        layout.retrieve_next_token[i, parent] = place
