"""What both sides return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ClippedTrees(NamedTuple):
    """keep: (bs, columns) bool, what is verified. sizes: (bs,) int32, nodes of each tree before it was clipped. surest:
    (bs, at most `most`) float32, keys of these nodes, falling; 0 behind the last."""

    keep: Tensor
    sizes: Tensor
    surest: Tensor
