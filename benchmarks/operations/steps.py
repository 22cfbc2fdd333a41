"""What both engines' steps are counted with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from benchmarks.operations.counter import OperationCounter

REQUESTS, DEPTH, VOCABULARY, HIDDEN = 8, 6, 300, 16
# of requests, the one of nobody among them
REQUEST_SLOTS = REQUESTS + 1
# Steps before the one that counts: by then the numbers of earlier ones arrive. On vLLM none do.
BEFORE, BEFORE_ON_VLLM = 2, 0
# Where a CUDA graph holds the operations, a launch of the graph is what the host sees.
IN_DRAFT_GRAPH, IN_TARGET_GRAPH = "draft graph", "target graph, one layer"
IN_GRAPHS = (IN_DRAFT_GRAPH, IN_TARGET_GRAPH)


class Steps(Protocol):
    """A server's steps, one after the other."""

    def step(self) -> None: ...


def counted(
    begun: Callable[[OperationCounter], Steps],
    stand_ins: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    *,
    before: int = BEFORE,
    on_host: bool = False,
) -> OperationCounter:
    """What one step, in full swing, dispatches. begun: makes the server. before: steps that do not count. on_host: see
    OperationCounter."""
    with OperationCounter(on_host=on_host) as counter, stand_ins():
        steps = begun(counter)
        for _ in range(before):
            steps.step()
        counter.forget()
        steps.step()
    return counter
