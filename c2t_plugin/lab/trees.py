"""Draft trees grown as EAGLE-2 grows them, whole, with the acceptance of every node (C2T B.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from c2t_kernels import draft_stats
from c2t_plugin.errors import C2TError
from c2t_plugin.features import NodeStats
from c2t_plugin.lab.plans import TreeShape


class TreeDraft(Protocol):
    """A draft model at many decoding states at once; it answers for one layer of nodes after another."""

    def root_logits(self) -> Tensor:
        """(states, vocab) logits of the token after the root."""

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one node per branch.

        token_ids, parents: (states, branches) int64; parents index the branches of the previous call (0, the root, in
        the first). Returns (states, branches, vocab) logits of the token after each node.
        """


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
        shape = self.joint_log_prob.shape
        return NodeStats(
            joint_log_prob=self.joint_log_prob,
            log_prob=self.log_prob,
            entropy=self.entropy.repeat_interleave(self.k, dim=1),
            depth=self.depth.expand(shape),
            rank=self.rank.expand(shape),
            margin=self.margin.repeat_interleave(self.k, dim=1),
        )


PER_DISTRIBUTION = ("entropy", "margin", "parent_ids")
TABLES = ("joint_log_prob", "log_prob", *PER_DISTRIBUTION, "token_ids", "accepted")

# 1,010 nodes need 10 bits, and no tree of a served size needs 16
DTYPES = {"parent_ids": torch.int16, "token_ids": torch.int32}


def join(forests: list[Forest]) -> Forest:
    """One forest of all trees, in order; all must have the same k and layers."""
    first = forests[0]
    tables = {name: torch.cat([getattr(forest, name) for forest in forests]) for name in TABLES}
    return Forest(first.k, first.layers, **tables)


def grow(draft: TreeDraft, continuation: Tensor, shape: TreeShape) -> Forest:
    """One whole tree per decoding state.

    continuation: (states, layers) int64, the target's own next tokens after the root; greedy acceptance follows it.
    Every expanded node gets its k most probable children; the k nodes of a layer with the highest joint probability
    are expanded. With k = 1 this is the chain of a greedy draft.
    """
    k, layers = shape.k, shape.layers
    logits = draft.root_logits()[:, None]
    rows = len(logits)
    joint = logits.new_zeros(rows, 1, dtype=torch.float32)
    owners = torch.full((rows, 1), -1, dtype=torch.int64)
    alive = torch.ones(rows, 1, dtype=torch.bool)
    offset = 0
    parts: dict[str, list[Tensor]] = {name: [] for name in TABLES}
    for layer in range(layers):
        stats = draft_stats(logits.flatten(0, 1), shape.top_m, k)
        log_prob = stats.log_probs.reshape(rows, -1, k)
        token_ids = stats.token_ids.reshape(rows, -1)
        children = (joint[..., None] + log_prob).flatten(1)
        hit = token_ids == continuation[:, layer, None]
        accepted = alive.repeat_interleave(k, dim=1) & hit
        per_distribution = (stats.entropy.view(rows, -1), stats.margin.view(rows, -1), owners)
        found = (children, log_prob.flatten(1), *per_distribution, token_ids, accepted)
        for name, value in zip(TABLES, found, strict=True):
            parts[name].append(value)
        if layer + 1 < layers:
            joint, best = children.topk(k, dim=1)
            owners, alive = offset + best, accepted.gather(1, best)
            offset += children.shape[1]
            logits = draft.extend(token_ids.gather(1, best), best // k)
    tables = {name: torch.cat(values, dim=1) for name, values in parts.items()}
    return Forest(k, layers, **{name: value.to(DTYPES.get(name, value.dtype)) for name, value in tables.items()})
