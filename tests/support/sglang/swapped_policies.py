"""A plugin for tests only: a running server has the policy, and may verify the nodes, that the file TREE_POLICY names.

Everything of a policy is the product's: `slot_policy`, and whether its branches inherit keys. The worker knows it for
life, so its attributes are looked up here instead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def chosen() -> tuple[str, int]:
    name, most = Path(os.environ["TREE_POLICY"]).read_text().split()
    return name, int(most)


def register() -> None:
    from c2t_plugin.engines.sglang.drafters.tree import TreeDrafter
    from c2t_plugin.trees.by_name import slot_policy
    from c2t_plugin.trees.grower import TreeGrower

    known: dict[str, Any] = {}
    make = TreeDrafter.scorer_of

    def remembering(worker: Any, classifier: Any, beta: float, config: Any) -> Any:
        known.update(
            (name, slot_policy(name, classifier, worker.topk, worker.device))
            for name in ("prob", "eagle2", "dyspec", "entropy", "static")
        )
        return make(worker, classifier, beta, config)

    def ignored(self: Any, value: Any) -> None:
        """What the server was started with."""

    TreeDrafter.scorer_of = staticmethod(remembering)  # type: ignore[method-assign]
    TreeDrafter.inherits = property(lambda self: chosen()[0] != "eagle2", ignored)  # type: ignore[assignment]
    TreeGrower.policy = property(lambda self: known[chosen()[0]], ignored)  # type: ignore[assignment]
    TreeGrower.max_nodes = property(lambda self: chosen()[1], ignored)  # type: ignore[attr-defined]
