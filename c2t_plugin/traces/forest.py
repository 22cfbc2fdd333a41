"""Whole trees of one shape as tables: what traces record and replays read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from c2t_kernels import DraftStats
from c2t_kernels.network import NodeStats, PathSums, SiblingStats, extend_path
from c2t_plugin.errors import C2TError


def node_count(k: int, layers: int) -> int:
    """Draft nodes of a whole tree, root excluded: k below the root, k * k in every later layer."""
    return k + (layers - 1) * k * k


def distribution_count(k: int, layers: int) -> int:
    """Distributions that a whole tree's nodes are drawn from: the root's, then k of every expanded layer."""
    return 1 + (layers - 1) * k


@dataclass(frozen=True)
class Forest:
    """Whole trees of one shape. Column i of a node table belongs to distribution i // k and has rank i % k in it.

    k: children of every expanded node, and expanded nodes per layer. layers: depth of the deepest nodes.
    joint_log_prob, log_prob: (trees, nodes) float32, nats.
    entropy, margin: (trees, distributions) float32, of the distribution that a node's siblings and itself come from.
    parent_ids: (trees, distributions) int16, the node that the distribution follows; -1 is the root.
    token_ids: (trees, nodes) int32.
    accepted: (trees, nodes) bool, whether the target would keep the node and all of its ancestors.
    """

    k: int
    layers: int
    joint_log_prob: Tensor
    log_prob: Tensor
    entropy: Tensor
    margin: Tensor
    parent_ids: Tensor
    token_ids: Tensor
    accepted: Tensor

    def __post_init__(self) -> None:
        trees = len(self.accepted)
        nodes, distributions = node_count(self.k, self.layers), distribution_count(self.k, self.layers)
        for name in TABLES:
            expected = (trees, distributions if name in PER_DISTRIBUTION else nodes)
            found = tuple(getattr(self, name).shape)
            if found != expected:
                raise C2TError(f"{name} has shape {found}, {trees} trees of {self.layers} layers have {expected}")

    def __len__(self) -> int:
        return len(self.accepted)

    def __getitem__(self, rows: Tensor) -> Forest:
        """The trees of these rows (bool mask or int64 indices)."""
        return Forest(self.k, self.layers, **{name: getattr(self, name)[rows] for name in TABLES})

    @property
    def depth(self) -> Tensor:
        """(nodes,) float32 edges from the root, the same in every tree."""
        later = torch.arange(2, self.layers + 1).repeat_interleave(self.k**2)
        return torch.cat([torch.ones(self.k), later.float()])

    @property
    def rank(self) -> Tensor:
        """(nodes,) float32 place among siblings by probability, 0 the most probable."""
        return (torch.arange(node_count(self.k, self.layers)) % self.k).float()

    def stats(self) -> NodeStats:
        """Statistics of all nodes, (trees, nodes) float32 each."""
        shape, shared = self.joint_log_prob.shape, SiblingStats.of(self.distributions())
        return NodeStats(
            joint_log_prob=self.joint_log_prob,
            log_prob=self.log_prob,
            depth=self.depth.expand(shape),
            rank=self.rank.expand(shape),
            path_entropy=self.path_entropy().repeat_interleave(self.k, dim=1),
            **{name: value.repeat_interleave(self.k, dim=1) for name, value in shared._asdict().items()},
        )

    def distributions(self) -> DraftStats:
        """Statistics of all distributions, as they were recorded: (trees, distributions) and (trees, .., k)."""
        siblings = (-1, self.k)
        return DraftStats(
            self.token_ids.unflatten(1, siblings), self.log_prob.unflatten(1, siblings), self.entropy, self.margin
        )

    def path_entropy(self) -> Tensor:
        """(trees, distributions) float32 sum of the entropies from the root's distribution down to each."""
        total = self.entropy.clone()
        for start in range(1, total.shape[1], self.k):
            layer = slice(start, start + self.k)
            above = total.gather(1, self.parent_ids[:, layer].long() // self.k)
            # the joint probability is recorded, so none is summed
            none = torch.zeros_like(above)
            total[:, layer] = extend_path(PathSums(none, above), none, self.entropy[:, layer]).path_entropy
        return total


PER_DISTRIBUTION = ("entropy", "margin", "parent_ids")
TABLES = ("joint_log_prob", "log_prob", *PER_DISTRIBUTION, "token_ids", "accepted")

# 1,010 nodes need 10 bits, and no tree of a served size needs 16
DTYPES = {"parent_ids": torch.int16, "token_ids": torch.int32}


def join(forests: list[Forest]) -> Forest:
    """One forest of all trees, in order; all must have the same k and layers."""
    first = forests[0]
    tables = {name: torch.cat([getattr(forest, name) for forest in forests]) for name in TABLES}
    return Forest(first.k, first.layers, **tables)
