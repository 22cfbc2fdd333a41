"""What workers hand over with a step's sampled tokens: its drafts on model runner V1, what was verified on V2.

vLLM asks its workers for drafts after each step, which costs a message there and back. On V1 they are lists by the
time that the tokens are handed over. On V2 they may still be on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from c2t_plugin.engines.patching import ATTRIBUTE


class Handed(NamedTuple):
    """Set on a ModelRunnerOutput. drafts: vLLM's DraftTokenIds of the step. verified: draft tokens of each request that
    the target has verified, where vLLM's own numbers are of more."""

    drafts: Any = None
    verified: Mapping[str, int] | None = None

    @classmethod
    def of(cls, output: Any) -> Handed:
        """With this output; empty where nothing is."""
        found: Handed = getattr(output, ATTRIBUTE, None) or cls()
        return found


def hand(output: Any, take: Callable[[], Any]) -> Any:
    """A step's output, with its drafts. take: what vLLM would ask the worker for. An output that is of no requests gets
    none: vLLM shares one of those among all steps."""
    if output is not None and output.req_ids:
        setattr(output, ATTRIBUTE, Handed(take()))
    return output


def posting(stock: Callable[..., None]) -> Callable[..., None]:
    """EngineCore.post_step, with drafts that the scheduler was handed, where it was."""

    @functools.wraps(stock)
    def post_step(self: Any, model_executed: bool) -> None:
        drafts = getattr(self.scheduler, "handed", None)
        if drafts is None or not model_executed:
            stock(self, model_executed)
            return
        self.scheduler.handed = None
        self.scheduler.update_draft_token_ids(drafts)

    return post_step
