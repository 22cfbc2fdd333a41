"""How drafts come about, one file per shape: what a drafter is, and the two that there are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol


class Drafter(Protocol):
    """Composed into each draft worker (worker.py), which calls it in this order in every step that is not idle."""

    def drafting(self) -> contextlib.AbstractContextManager[None]:
        """Around SGLang's `draft`, which prepares the batch and runs the loop or replays its CUDA graph."""

    def loop(self, forward_batch: Any, stock: Callable[[Any], Any]) -> Any:
        """The draft loop, with every token scored; CUDA graphs capture it. stock: SGLang's. Result as of that."""

    def decide(self, batch: Any, drafted: Any) -> Any:
        """What of each draft is verified: the verify input, with its `Step`. drafted: what SGLang's `draft` gave."""

    def capturing(self) -> contextlib.AbstractContextManager[None]:
        """Around SGLang's capture of the loop in CUDA graphs, at start."""


def drafter_class(mode: str) -> Any:
    """The drafter of chains or of trees; what the other needs is not loaded."""
    if mode == "tree":
        from c2t_plugin.engines.sglang.drafters.tree import TreeDrafter

        return TreeDrafter
    from c2t_plugin.engines.sglang.drafters.chain import ChainDrafter

    return ChainDrafter
