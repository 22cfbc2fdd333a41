"""Draft depths that a running server switches between, the whole of its resources for each made at start."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from c2t_plugin.engines.sglang import states

_CHANGE = "Switch adaptive runtime state"


def _no_change(line: logging.LogRecord) -> bool:
    return not line.getMessage().startswith(_CHANGE)


class DepthSwitch:
    """In the place of the controller of SGLang's `--speculative-adaptive`, whose states it has the worker build: one
    for each depth, with attention backends and CUDA graphs of its own. How the draft has read all tokens when it is
    wanted again, after steps of depth 0: see behind.py."""

    def __init__(self, worker: Any, depths: Sequence[int]) -> None:
        """worker: SGLang's EAGLEWorkerV2. depths: rising; the last one is that which the server starts with."""
        self._worker, self.depths = worker, depths
        self._states: dict[int, Any] = {}
        # SGLang has a line for every change, which here may come with every step.
        logging.getLogger("sglang.srt.speculative.eagle_worker_v2").addFilter(_no_change)

    def register(self, state: Any) -> None:
        """Keep the state that the server was started with, that of the whole depth."""
        self._states[state.speculative_num_steps] = state

    def init_states(self, **_: Any) -> None:
        """Build the others."""
        whole = self._states[self.depths[-1]]
        for depth in self.depths[:-1]:
            if self._worker.device == "cpu":
                # SGLang would look for CUDA graphs, and the CPU's attention takes every depth.
                shape = {"speculative_num_steps": depth, "speculative_num_draft_tokens": depth + 1}
                self._states[depth] = dataclasses.replace(whole, **shape)
            else:
                self._states[depth] = states.build(self._worker, depth, depth + 1)

    def switch(self, depth: int) -> None:
        """Draft so deep from now on."""
        states.apply(self._worker, self._states[depth])

    def on_verify_complete(self, *_: Any, **__: Any) -> None:
        """SGLang's own decides here, by what was accepted."""
