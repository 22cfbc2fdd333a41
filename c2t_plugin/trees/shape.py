"""Which shapes of trees can be grown and verified: children, layers, nodes in all."""

from __future__ import annotations

from c2t_plugin.errors import ConfigError
from c2t_plugin.trees.by_name import largest_tree
from c2t_plugin.trees.published import EAGLE1_DEPTH, EAGLE1_WIDTH

# Children per node and nodes per layer when --speculative-eagle-topk is not given: SGLang's own choice for most models.
DEFAULT_TOPK = 4
# What one launch of the growth kernel holds: top-k squared children of one request.
MAX_TOPK = 32
# What one launch that lays out trees holds: children of all layers, and nodes of one tree.
MAX_CHILDREN, MAX_NODES = 4096, 1024


def fitting_shape(policy: str, steps: int, topk: int | None, width: int | None) -> tuple[int, int]:
    """Top-k and verified width of trees, the root included in the width.

    steps: draft steps. topk, width: as asked for; None: chosen here. Raises ConfigError for a shape that cannot be
    grown or verified.
    """
    topk = DEFAULT_TOPK if topk is None else topk
    if not 1 <= topk <= MAX_TOPK:
        raise ConfigError(f"--speculative-eagle-topk is {topk}; in tree mode it must be from 1 to {MAX_TOPK}")
    children = topk + (steps - 1) * topk**2
    if children > MAX_CHILDREN:
        raise ConfigError(
            f"--speculative-eagle-topk {topk} and --speculative-num-steps {steps} draft {children} nodes; tree mode "
            f"takes up to {MAX_CHILDREN}: use less of either"
        )
    if policy == "static" and (topk < EAGLE1_WIDTH or steps < EAGLE1_DEPTH):
        raise ConfigError(
            f"policy static is EAGLE-1's tree: it needs --speculative-eagle-topk of at least {EAGLE1_WIDTH} and "
            f"--speculative-num-steps of at least {EAGLE1_DEPTH}, got {topk} and {steps}"
        )
    largest = min(largest_tree(policy, topk, steps) + 1, MAX_NODES)
    # SGLang itself verifies the whole chain at top-k 1, whatever the width.
    smallest = largest if topk == 1 or policy == "static" else 2
    if width is not None and not smallest <= width <= largest:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {width}; with policy {policy}, top-k {topk} and {steps} draft "
            f"steps it must be from {smallest} to {largest}, the root included: choose one of them or leave it out"
        )
    fitting = min(largest, topk * steps + 1) if policy != "static" else largest
    return topk, fitting if width is None else width
