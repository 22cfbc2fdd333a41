"""Where the branches of a draft tree keep their keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def inherit_branches(buffers: Sequence[Tensor], slots: Tensor, parents: Tensor, written: int) -> None:
    """Give every branch the keys and values of the nodes above its newest one, in place.

    SGLang's draft attention reads fixed slots per branch: branch t what branch t wrote. A node that grew from another
    branch's node would so attend to tokens that are not above it.

    buffers: keys and values of every layer, (pool slots, ...). slots: (bs, branches, steps) int64 pool slots of each
    branch's steps. parents: (bs, branches) int branch that each newest node grew from, -1 where there is none.
    written: steps that hold keys so far.
    """
    target = slots[:, :, :written]
    source = target.gather(1, parents.clamp_min(0).long()[..., None].expand(-1, -1, written))
    for buffer in buffers:
        # Indexing copies, so a branch that is both read and written is read first.
        buffer[target.flatten()] = buffer[source.flatten()]
