"""What grown trees are worth, by how many of their layers there are: for who chooses the next ones' shape."""

from __future__ import annotations

import torch
from torch import Tensor


def best_by_layers(keep: Tensor, key: Tensor, layers: Tensor, depth: int, most: int) -> Tensor:
    """What a tree's best nodes are worth if only its first 1, 2, ... layers were there: (bs, depth, nodes) float32,
    falling, 0 where there are fewer nodes.

    keep, key, most: see planning.plan. layers: (columns,) int64, from 1 on. depth: layers that were drafted.
    """
    worth = _worth(keep, key)[:, None]
    upto = torch.arange(1, depth + 1, device=layers.device)[:, None]
    return torch.where(layers <= upto, worth, 0.0).topk(min(most, keep.shape[1])).values


def chain_by_layers(parent_ids: Tensor, keep: Tensor, key: Tensor, width: int, depth: int, nodes: int) -> Tensor:
    """The same of the chain in each tree, whose nodes are the likeliest children: what a draft of width 1 would have
    been, as far as the tree holds it.

    parent_ids: (bs, columns) int64. width: of the trees, children of a node and nodes drafted from per layer.
    """
    worth = _worth(keep, key)
    found = worth.new_zeros(len(worth), max(depth, nodes))
    found[:, 0] = worth[:, 0]
    above, alive = torch.zeros_like(parent_ids[:, :1]), keep[:, :1]
    for layer in range(1, depth):
        first = width + (layer - 1) * width**2
        # of each node the likeliest child
        children = torch.arange(first, first + width**2, width, device=keep.device)
        own = alive & keep[:, children] & (parent_ids[:, children] == above)
        found[:, layer] = torch.where(own, worth[:, children], 0.0).sum(1)
        above, alive = torch.where(own, children, 0).sum(1, keepdim=True), own.any(1, keepdim=True)
    return (found[:, None] * torch.ones(depth, found.shape[1], device=keep.device).tril())[..., :nodes]


def _worth(keep: Tensor, key: Tensor) -> Tensor:
    """The chance of each node that it is accepted; unknown ones' is 1, that of what is no node 0."""
    return key.clamp(max=1.0).masked_fill(~keep, 0.0)
