"""The draft tree: what every policy grows, every verification walks and every kernel's mask is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from c2t_kernels.network import NodeStats, SiblingStats
from c2t_plugin.errors import C2TError
from c2t_plugin.trees.nodes import ROOT


@dataclass(frozen=True)
class TokenTree:
    """Draft trees of a batch of decoding states; the root, which the target already chose, is no node.

    Every field is (batch, nodes). Parents stand before their children. Columns where `alive` is False are padding or
    cut nodes, anywhere; their other fields mean nothing.
    token_ids: int64. parent_ids: int64 column of the parent, -1 the root. depths: int64, 1 for a root's child.
    alive: bool. log_probs: float32, natural log of the node's own draft probability. joint_log_probs: float32, of the
    product from the root (C2T equation 1). entropy (nats), margin, leading_log_prob: float32, of the distribution that
    the node was drawn from. path_entropy: float32, nats, sum of that entropy and those above. rank: int64 place among
    its siblings, 0 the first. scores: float32, what the policy chose it by.
    """

    token_ids: Tensor
    parent_ids: Tensor
    depths: Tensor
    alive: Tensor
    log_probs: Tensor
    joint_log_probs: Tensor
    entropy: Tensor
    margin: Tensor
    leading_log_prob: Tensor
    path_entropy: Tensor
    rank: Tensor
    scores: Tensor

    @property
    def batch(self) -> int:
        return self.alive.shape[0]

    @property
    def nodes(self) -> int:
        """Columns, dead ones included."""
        return self.alive.shape[1]

    def sizes(self) -> Tensor:
        """(batch,) int64 gamma: draft tokens for the target to verify, root excluded."""
        return self.alive.sum(1)

    def stats(self) -> NodeStats:
        """What a classifier may look at, (batch, nodes) float32 each."""
        return NodeStats(
            joint_log_prob=self.joint_log_probs,
            log_prob=self.log_probs,
            depth=self.depths.float(),
            rank=self.rank.float(),
            path_entropy=self.path_entropy,
            **{name: getattr(self, name) for name in SiblingStats._fields},
        )

    @classmethod
    def of_stats(
        cls, stats: NodeStats, *, token_ids: Tensor, parent_ids: Tensor, alive: Tensor, scores: Tensor
    ) -> TokenTree:
        """Inverse of `stats`: (batch, nodes) each."""
        return cls(
            token_ids=token_ids,
            parent_ids=parent_ids,
            depths=stats.depth.long(),
            alive=alive,
            log_probs=stats.log_prob,
            joint_log_probs=stats.joint_log_prob,
            path_entropy=stats.path_entropy,
            rank=stats.rank.long(),
            scores=scores,
            **{name: getattr(stats, name) for name in SiblingStats._fields},
        )

    def above(self, values: Tensor, root: float | bool) -> Tensor:
        """Each node's parent's value: (batch, nodes) any dtype -> the same; `root` below the root."""
        if not self.nodes:
            return values
        return values.gather(1, self.parent_ids.clamp_min(0)).masked_fill(self.parent_ids < 0, root)

    def closed(self, mask: Tensor) -> Tensor:
        """The live nodes in the mask whose ancestors are all live and in it: (batch, nodes) bool -> the same."""
        kept = self.alive & mask
        while True:
            attached = kept & self.above(kept, root=True)
            if torch.equal(attached, kept):
                return kept
            kept = attached

    def keep(self, mask: Tensor) -> TokenTree:
        """The same columns with only the nodes in the mask alive: (batch, nodes) bool.

        Raises C2TError if a node is kept whose parent is not; `closed` makes such a mask ancestor-closed.
        """
        kept = self.alive & mask
        orphans = kept & ~self.above(kept, root=True)
        if orphans.any():
            row, column = orphans.nonzero()[0].tolist()
            raise C2TError(f"node {column} of tree {row} would be kept without its parent; pass the mask to closed()")
        return replace(self, alive=kept)

    def compact(self) -> TokenTree:
        """The live nodes only, in their order, moved to the left and as wide as the largest tree."""
        columns = pack(self.alive)
        live = columns >= 0
        index = columns.clamp_min(0)
        moved = {item.name: getattr(self, item.name).gather(1, index) for item in fields(self)}
        places = torch.cat([self.alive.cumsum(1) - 1, torch.full_like(self.alive[:, :1], ROOT, dtype=torch.int64)], 1)
        # column -1, the root, picks the last place, which says -1
        parents = places.gather(1, moved["parent_ids"] % places.shape[1]) if self.nodes else moved["parent_ids"]
        padded = {name: value.masked_fill(~live, 0) for name, value in {**moved, "alive": live}.items()}
        return TokenTree(**{**padded, "parent_ids": parents.masked_fill(~live, ROOT)})

    def ancestors(self) -> Tensor:
        """(batch, nodes, nodes) bool: [b, i, j] where j is i or an ancestor of i, both alive."""
        # one column more: that of the root, where every walk ends
        found = torch.zeros(self.batch, self.nodes, self.nodes + 1, dtype=torch.bool, device=self.alive.device)
        parents = torch.cat([self.parent_ids, torch.full_like(self.parent_ids[:, :1], ROOT)], dim=1) % (self.nodes + 1)
        at = torch.arange(self.nodes, device=self.alive.device).expand(self.batch, -1)
        while (at < self.nodes).any():
            found.scatter_(2, at[..., None], True)
            at = parents.gather(1, at)
        return found[..., : self.nodes] & self.alive[:, :, None] & self.alive[:, None, :]

    def validate(self) -> TokenTree:
        """Itself. Raises C2TError unless shapes, dtypes, depths and the order of parents are as documented."""
        for item in fields(self):
            value, dtype = getattr(self, item.name), DTYPES[item.name]
            if value.shape != self.alive.shape or value.dim() != 2 or value.dtype != dtype:
                found = f"{tuple(value.shape)} {value.dtype}"
                raise C2TError(f"tree: {item.name} is {found}, expected {tuple(self.alive.shape)} {dtype}")
        columns = torch.arange(self.nodes, device=self.alive.device)
        parents = self.parent_ids
        if (self.alive & ((parents < ROOT) | (parents >= columns))).any():
            raise C2TError("tree: a parent must stand before its children, and -1 is the root")
        safe = replace(self, parent_ids=parents.where(self.alive, ROOT))
        if (self.alive & ~safe.above(self.alive, root=True)).any():
            raise C2TError("tree: a live node has a dead parent")
        if (self.alive & (self.depths != safe.above(self.depths, root=0) + 1)).any():
            raise C2TError("tree: a node must be one deeper than its parent, a root's child has depth 1")
        return self

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> TokenTree:
        """Trees without nodes."""
        return cls(**{name: torch.zeros(batch, 0, dtype=dtype, device=device) for name, dtype in DTYPES.items()})

    @classmethod
    def join(cls, blocks: Sequence[TokenTree]) -> TokenTree:
        """The columns of all blocks beside each other; parent_ids count from the first block's first column."""
        return cls(**{name: torch.cat([getattr(block, name) for block in blocks], dim=1) for name in DTYPES})

    @classmethod
    def stack(cls, trees: Sequence[TokenTree]) -> TokenTree:
        """One batch of all trees, padded on the right to the widest."""
        width = max(tree.nodes for tree in trees)
        filled = [cls.join([tree, _dead(tree.batch, width - tree.nodes, tree.alive.device)]) for tree in trees]
        return cls(**{name: torch.cat([getattr(tree, name) for tree in filled]) for name in DTYPES})


DTYPES = {
    "token_ids": torch.int64,
    "parent_ids": torch.int64,
    "depths": torch.int64,
    "alive": torch.bool,
    "log_probs": torch.float32,
    "joint_log_probs": torch.float32,
    **dict.fromkeys(SiblingStats._fields, torch.float32),
    "path_entropy": torch.float32,
    "rank": torch.int64,
    "scores": torch.float32,
}


def _dead(batch: int, nodes: int, device: torch.device) -> TokenTree:
    shape = (batch, nodes)
    blank = {name: torch.zeros(shape, dtype=dtype, device=device) for name, dtype in DTYPES.items()}
    return TokenTree(**{**blank, "parent_ids": torch.full(shape, ROOT, device=device)})


def pack(mask: Tensor) -> Tensor:
    """Columns of the True entries, in their order: (batch, columns) bool -> (batch, most in a row) int64, -1 pads."""
    counts = mask.sum(1)
    packed = mask.new_full((len(mask), int(counts.max()) if counts.numel() else 0), ROOT, dtype=torch.int64)
    rows, columns = mask.nonzero(as_tuple=True)
    firsts = counts.cumsum(0) - counts
    packed[rows, torch.arange(len(rows), device=mask.device) - firsts[rows]] = columns
    return packed
