"""Draft depths that a running server switches between, the whole of its resources for each made at start."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from c2t_plugin.engines.sglang import states

if TYPE_CHECKING:
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2 as _StockWorker
else:
    _StockWorker = object

_CHANGE = "Switch adaptive runtime state"


class DepthSwitch:
    """In the place of the controller of SGLang's `--speculative-adaptive`, whose states it has the worker build: one
    for each depth, with attention backends and CUDA graphs of its own. SGLang's draft extend follows every step, that
    of depth 0 too, so that the draft has read all tokens when it is wanted again."""

    def __init__(self, worker: Any, depths: Sequence[int]) -> None:
        """worker: SGLang's EAGLEWorkerV2. depths: rising; the last one is that which the server starts with."""
        self._worker, self._depths = worker, depths
        self._states: dict[int, Any] = {}
        # SGLang has a line for every change, which here may come with every step.
        logger = logging.getLogger("sglang.srt.speculative.eagle_worker_v2")
        logger.addFilter(lambda line: not line.getMessage().startswith(_CHANGE))

    def register(self, state: Any) -> None:
        """Keep the state that the server was started with, that of the whole depth."""
        self._states[state.speculative_num_steps] = state

    def init_states(self, **_: Any) -> None:
        """Build the others."""
        whole = self._states[self._depths[-1]]
        for depth in self._depths[:-1]:
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


class DepthMixin(_StockWorker):
    """Over a stock worker: has a DepthSwitch follow the planner, once there is one."""

    adaptive_controller: Any
    _draft_worker: Any
    _reqs: Sequence[Any] = ()

    def forward_batch_generation(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        self._reqs = batch.reqs
        return super().forward_batch_generation(batch, *positional, **keyword)

    def activate_step_by_batch(self, batch_size: int) -> None:
        """SGLang asks for the depth of a step here, before it drafts."""
        if isinstance(self.adaptive_controller, DepthSwitch) and batch_size:
            self.adaptive_controller.switch(self._draft_worker.plan(self._reqs))

    def _build_trivial_verify_input(self, batch: Any) -> Any:
        verify_input = super()._build_trivial_verify_input(batch)
        if not batch.forward_mode.is_idle():
            if self.speculative_algorithm.is_standalone():
                # It drafts without the target's hidden states, for which the stock method asks.
                verify_input.capture_hidden_mode = CaptureHiddenMode.NULL
            # as the drafts of every other depth have it; the CPU's kernel takes no other
            verify_input.draft_token = verify_input.draft_token.long()
            verify_input.c2t_kept = torch.zeros(len(batch.reqs), dtype=torch.int32, device=self.device)
        return verify_input
