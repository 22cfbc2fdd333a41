"""What `build_tree` gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TreeLayout(NamedTuple):
    """One tree per request in `bucket` places. Place 0 is the root, kept nodes follow, pads fill the rest.

    draft_tokens: (bs, bucket) int64; 0 in a pad.
    positions: (bs, bucket) int64, prefix length + depth; the prefix length in a pad.
    retrieve_index: (bs, bucket) int64, place in the flattened batch.
    retrieve_next_token: (bs, bucket) int64, place of the first child, -1 if there is none.
    retrieve_next_sibling: (bs, bucket) int64, place of the next child of the same parent, -1 if there is none.
    parents: (bs, bucket) int32, place of the parent; -1 for the root and pads.
    slots: (bs, bucket) int32, the slot that the node came from; -1 for the root, -2 for pads.
    counts: (bs,) int32, nodes of each tree with the root, pads not counted.
    mask: (bs, bucket, bucket) bool, True where row is column or below it.

    No link leads to a pad, so a verifier cannot reach one; a pad attends to itself alone (and to the prefix).
    """

    draft_tokens: Tensor
    positions: Tensor
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    parents: Tensor
    slots: Tensor
    counts: Tensor
    mask: Tensor
