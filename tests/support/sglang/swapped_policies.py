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
    from c2t_plugin.engines.sglang.trees.grower import TreeGrower
    from c2t_plugin.engines.sglang.trees.policies import slot_policy
    from c2t_plugin.engines.sglang.trees.worker import _TreeDraftMixin

    known: dict[str, Any] = {}
    make = _TreeDraftMixin._make_scorer

    def remembering(self: Any, classifier: Any, beta: float, config: Any) -> Any:
        known.update(
            (name, slot_policy(name, classifier, self.topk, self.device))
            for name in ("prob", "eagle2", "dyspec", "entropy", "static")
        )
        return make(self, classifier, beta, config)

    def ignored(self: Any, value: Any) -> None:
        """What the server was started with."""

    _TreeDraftMixin._make_scorer = remembering  # type: ignore[method-assign]
    _TreeDraftMixin._inherits = property(lambda self: chosen()[0] != "eagle2", ignored)  # type: ignore[assignment]
    TreeGrower.policy = property(lambda self: known[chosen()[0]], ignored)  # type: ignore[assignment]
    TreeGrower.max_nodes = property(lambda self: chosen()[1], ignored)  # type: ignore[attr-defined]
