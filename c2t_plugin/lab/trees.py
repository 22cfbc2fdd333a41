"""Draft trees grown as EAGLE-2 grows them, whole, with the acceptance of every node (C2T B.1)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from c2t_plugin.lab.grow import Distributions, Drafter, Growth, grow_tree
from c2t_plugin.lab.plans import TreeShape
from c2t_plugin.lab.policies.base import no_columns
from c2t_plugin.lab.policies.eagle2 import Eagle2
from c2t_plugin.lab.token_tree import TokenTree
from c2t_plugin.traces.forest import DTYPES, Forest


@dataclass(frozen=True, kw_only=True)
class WholeTree(Eagle2):
    """EAGLE-2's tree in the fixed shape of a Forest: tokens of probability 0 have columns too, none is reranked away,
    and the distributions stand in the order of their nodes' joint probability."""

    max_nodes: int = sys.maxsize

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        block = super().branch(growth, distributions)
        return replace(block, alive=torch.ones_like(block.alive))

    def expand(self, growth: Growth) -> Tensor:
        if growth.depth == self.d_max:
            return no_columns(growth)
        order = growth.newest.joint_log_probs.argsort(dim=1, descending=True, stable=True)
        return growth.first + order[:, : self.k]


def grow(draft: Drafter, continuation: Tensor, shape: TreeShape) -> Forest:
    """One whole tree per decoding state.

    continuation: (states, layers) int64, the target's own next tokens after the root; greedy acceptance follows it.
    Every expanded node gets its k most probable children; the k nodes of a layer with the highest joint probability
    are expanded. With k = 1 this is the chain of a greedy draft.
    """
    whole = WholeTree(d_max=shape.layers, k=shape.k, top_m=shape.top_m)
    tree = grow_tree(draft, whole, keep_distributions=False).tree
    first = tree.rank[0] == 0
    tables = {
        "joint_log_prob": tree.joint_log_probs,
        "log_prob": tree.log_probs,
        "entropy": tree.entropy[:, first],
        "margin": tree.margin[:, first],
        "parent_ids": tree.parent_ids[:, first],
        "token_ids": tree.token_ids,
        "accepted": tree.closed(tree.token_ids == continuation.gather(1, tree.depths - 1)),
    }
    return Forest(
        shape.k, shape.layers, **{name: value.to(DTYPES.get(name, value.dtype)) for name, value in tables.items()}
    )
