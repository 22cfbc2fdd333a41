"""Node orders of a draft tree, and how many blocks of its attention mask they leave non-zero (DySpec appendix C).

All take one tree as `parent_ids`: (nodes,) int64, the column of each node's parent, -1 below the root, parents before
children. The root is no node. An order is a (nodes,) int64 permutation, parents before children
as well: position i of the reordered tree holds node `order[i]`.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from c2t_plugin.errors import C2TError

# of the Triton kernel that DySpec measured (its C.1)
PAPER_BLOCK = 32


def insertion_order(parent_ids: Tensor) -> Tensor:
    """The order in which the nodes were drafted: (nodes,) int64, 0, 1, 2, ..."""
    return torch.arange(len(_checked(parent_ids)))


def depth_first_order(parent_ids: Tensor) -> Tensor:
    """Depth-first, siblings in the order in which they were drafted: (nodes,) int64. DySpec serves with this one."""
    return _preorder(_checked(parent_ids), heavy_first=False)


def heavy_path_order(parent_ids: Tensor) -> Tensor:
    """Heavy-path decomposition (Sleator and Tarjan 1981): depth-first, the largest subtree first: (nodes,) int64.

    DySpec C has all siblings "in descending order of their subtree sizes"; equal sizes stay in the order of drafting.
    """
    return _preorder(_checked(parent_ids), heavy_first=True)


ORDERS = {"insertion": insertion_order, "depth-first": depth_first_order, "heavy-path": heavy_path_order}


def reorder(parent_ids: Tensor, order: Tensor) -> Tensor:
    """The same tree with its nodes in another order: (nodes,) int64 parent_ids.

    Any other column of the tree follows as `column[order]`. Raises C2TError unless `order` is a permutation that keeps
    parents before children.
    """
    parents = _checked(parent_ids)
    place = _places(order, len(parents))
    # the last entry is what parent -1 reads
    moved = torch.cat([place, torch.tensor([-1])])[parents[torch.as_tensor(order)]]
    return _checked(moved)


def attention_blocks(parent_ids: Tensor, order: Tensor | None = None, block: int = PAPER_BLOCK, prefix: int = 0) -> int:
    """Blocks of the tree's attention mask that hold at least one entry to compute.

    The mask has a row per node, which is set on the node itself, its ancestors and the whole prefix.
    order: insertion order if None; here it need not keep parents first.
    block: side of a block, in tokens; the last row and column of blocks may be cut.
    prefix: tokens in front of the nodes, the root included; 0 counts the tree's own part alone, without the root.
    """
    if block < 1 or prefix < 0:
        raise C2TError(f"attention blocks need block >= 1 and prefix >= 0, got block {block} and prefix {prefix}")
    parents = _checked(parent_ids)
    place = torch.arange(len(parents)) if order is None else _places(order, len(parents))
    rows, columns = place // block, (prefix + place) // block
    touched = torch.zeros(-(-len(parents) // block), -(-(prefix + len(parents)) // block), dtype=torch.bool)
    touched[:, : -(-prefix // block)] = True
    # all nodes climb together, one edge a round, until each has passed its last ancestor
    node = ancestor = torch.arange(len(parents))
    while len(node):
        touched[rows[node], columns[ancestor]] = True
        above = parents[ancestor]
        node, ancestor = node[above >= 0], above[above >= 0]
    return int(touched.sum())


def _checked(parent_ids: Tensor) -> Tensor:
    parents = torch.as_tensor(parent_ids)
    if parents.dim() != 1 or parents.is_floating_point() or parents.dtype == torch.bool:
        found = f"shape {tuple(parents.shape)}, {parents.dtype}"
        raise C2TError(f"parent_ids must be integers of one tree, (nodes,), got {found}; pass one row of a batch")
    parents = parents.cpu().long()
    late = (parents >= torch.arange(len(parents))) | (parents < -1)
    if late.any():
        at = int(late.nonzero()[0])
        raise C2TError(
            f"node {at} has parent {int(parents[at])}: a parent must be -1, the root, or an earlier node; "
            "pass the live nodes alone, parents before children"
        )
    return parents


def _places(order: Tensor, nodes: int) -> Tensor:
    """The inverse permutation: where each node comes to lie."""
    order = torch.as_tensor(order)
    if not torch.equal(order.sort().values, torch.arange(nodes)):
        raise C2TError(
            f"an order of {nodes} nodes must hold each of 0 to {nodes - 1} once, got {order.tolist()[:8]}..."
        )
    return order.argsort()


def _sizes(parents: list[int]) -> list[int]:
    sizes = [1] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    return sizes


def _preorder(parent_ids: Tensor, heavy_first: bool) -> Tensor:
    """A node lies right behind its parent and the whole subtrees of the siblings that come before it."""
    parents = parent_ids.tolist()
    sizes = _sizes(parents)
    siblings = sorted(range(len(parents)), key=lambda node: (parents[node], -sizes[node] if heavy_first else 0, node))
    place = [0] * len(parents)
    # groups come by parent, so a parent's place is known before its children's
    for parent, children in groupby(siblings, key=parents.__getitem__):
        start = 0 if parent < 0 else place[parent] + 1
        for node in children:
            place[node] = start
            start += sizes[node]
    return torch.tensor(place, dtype=torch.int64).argsort()
