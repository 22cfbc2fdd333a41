"""The rules by which trees grow, by the names that c2t_plugin.config.POLICIES gives them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.config import THRESHOLDS
from c2t_plugin.trees.policies import C2TSlots, DySpecSlots, Eagle2Slots, ProbSlots, SlotPolicy


def slot_policy(name: str, classifier: NodeClassifier, width: int, device: torch.device | str) -> SlotPolicy:
    """The policy of this name from c2t_plugin.config.POLICIES."""
    if name in ("entropy", "static"):
        from c2t_plugin.trees import rivals

        entropy = name == "entropy"
        return rivals.EntropySlots(width, rivals.EntropyWidth()) if entropy else rivals.StaticSlots(width, device)
    if name == "c2t":
        return C2TSlots(classifier.network(device), width)
    simple: dict[str, Callable[[int], SlotPolicy]] = {"prob": ProbSlots, "eagle2": Eagle2Slots, "dyspec": DySpecSlots}
    return simple[name](width)


def largest_tree(name: str, topk: int, steps: int) -> int:
    """Most nodes of a tree, the root not counted."""
    if name == "static":
        from c2t_plugin.trees.published import EAGLE1_PATHS

        return len(EAGLE1_PATHS)
    return topk * steps if name in THRESHOLDS else topk + (steps - 1) * topk**2
