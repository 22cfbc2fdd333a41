"""EAGLE-2's dynamic trees, which EAGLE-3 keeps: expand by joint probability, then rerank (C2T 2, appendix A)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from c2t_plugin.lab.grow import Distributions, Growth
from c2t_plugin.lab.policies.base import LayerPolicy, at_least, top_children
from c2t_plugin.lab.token_tree import TokenTree
from c2t_plugin.trees.nodes import best


@dataclass(frozen=True, kw_only=True)
class Eagle2(LayerPolicy):
    """EAGLE-2's tree (C2T 2, appendix A): per layer the k nodes of highest P are drafted from, k children each; the
    target verifies the best max_nodes.

    max_nodes: draft nodes, the root excluded; the papers' N counts the root.
    """

    max_nodes: int
    k: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "k", "max_nodes")

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        return top_children(growth, distributions, self.top_m, self.k)

    def may_grow(self, growth: Growth) -> Tensor:
        return best(growth.newest.joint_log_probs, growth.newest.alive, self.k)

    def finish(self, tree: TokenTree) -> Tensor:
        # P never rises along a path and a parent has the lower column, so the best nodes are ancestor-closed
        return best(tree.joint_log_probs, tree.alive, self.max_nodes)
