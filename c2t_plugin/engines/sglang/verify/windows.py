"""Uniform windows of a few widths, where the target cannot verify requests of different lengths (packing.py).

Each step's window is the narrowest that holds its longest kept draft. Each width has attention backends and CUDA graphs
of its own for verification and for the draft's extend pass behind it, made at start as those of SGLang's
`--speculative-adaptive` are; drafting is the same for all. SGLang's configuration keeps the whole width throughout: by
it the scheduler reserves slots, of which a narrower window uses the first ones.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input
from torch import Tensor

from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.sglang import ranks, states
from c2t_plugin.engines.sglang.step import attach, step_of
from c2t_plugin.engines.sglang.verify.layout import cut_links
from c2t_plugin.planner import switched_depths

logger = logging.getLogger(__name__)


def widths(widest: int, mode: str) -> tuple[int, ...]:
    """Places per request, the root's included, rising to `widest`: few, since each has CUDA graphs of its own."""
    if mode == "chain":
        return tuple(depth + 1 for depth in switched_depths(widest - 1))
    # a tree of few nodes is rare, and 1 or 2 places cost the same
    return tuple(sorted({max(min(2, widest), -(-widest // part)) for part in (1, 2, 4, 8)}))


class Windows:
    """In the place of the controller of SGLang's `--speculative-adaptive`, whose states it has the worker build."""

    def __init__(self, worker: Any, widths: tuple[int, ...]) -> None:
        """worker: SGLang's EAGLEWorkerV2. widths: rising; the last one is that which the server starts with."""
        self._worker, self.widths = worker, widths
        self._states: dict[int, Any] = {}
        # Of a chain of some depth, as SGLang lists a tree's parents and nodes, for as many requests as there are slots.
        self._chains: dict[int, tuple[Tensor, Tensor]] = {}

    def register(self, state: Any) -> None:
        """Keep the state that the server was started with, that of the whole width."""
        self._states[self.widths[-1]] = state

    def init_states(self, **_: Any) -> None:
        """Build the others."""
        chains = self._worker.topk == 1
        for width in self.widths[:-1]:
            # SGLang wants a chain's depth to fit its width; with trees, a depth of 1 has no draft graph to capture.
            self._states[width] = self._state(width - 1 if chains else 1, width)

    def _state(self, depth: int, width: int) -> Any:
        if self._worker.device == "cpu":
            # SGLang would look for CUDA graphs, and the CPU's attention takes every width.
            return self._states[self.widths[-1]]
        state = states.build(self._worker, depth, width)
        return dataclasses.replace(state, draft_attn_backend=None, cuda_graph_runner=None)

    def _chain(self, depth: int) -> tuple[Tensor, Tensor]:
        if depth not in self._chains:
            requests = len(self._worker.req_to_token_pool.req_to_token)
            # a single token has no list of parents
            lists = torch.arange(-1, (depth if depth > 1 else 0) - 1), torch.arange(depth)
            parents, nodes = (each.to(self._worker.device).repeat(requests, 1) for each in lists)
            self._chains[depth] = parents, nodes
        return self._chains[depth]

    def on_verify_complete(self, *_: Any, **__: Any) -> None:
        """SGLang's own decides here, by what was accepted."""

    def fitting(self, places: int) -> int:
        """The narrowest width that has so many places per request."""
        return min(width for width in self.widths if width >= places)

    def enter(self, width: int) -> None:
        """Verify, and extend the draft, at this width until `leave`."""
        worker, state = self._worker, self._states[width]
        draft, target = worker._draft_worker, worker.target_worker.model_runner
        worker.speculative_num_draft_tokens = draft.speculative_num_draft_tokens = width
        target.attn_backend, target.decode_cuda_graph_runner = state.target_attn_backend, state.target_graph_runner
        draft.draft_extend_attn_backend = state.draft_extend_attn_backend
        draft.cuda_graph_runner_for_draft_extend = state.cuda_graph_runner_for_draft_extend
        if state.draft_extend_attn_backend is not None:
            draft.draft_runner.attn_backend = state.draft_extend_attn_backend
        if worker.device == "cpu":
            target.attn_backend.num_draft_tokens = width

    def leave(self) -> None:
        """Back to the whole width, at which the next step drafts."""
        self.enter(self.widths[-1])

    def narrow(self, batch: Any, whole: Any) -> Any:
        """The verify input of a batch of chains at the width that fits, which is entered.

        whole: that of whole drafts, with its Step. Waits for the device, for one number: the host chooses the graph.
        """
        step = step_of(whole)
        assert step is not None
        kept = step.kept
        width = self.fitting(int(kept.max()) + 1)
        if width == self.widths[-1]:
            return whole
        self.enter(width)
        made = self._worker._build_trivial_verify_input(batch) if width == 1 else self._built(batch, whole, width)
        cut_links(made.retrieve_next_token, kept)
        attach(made, step)
        return made

    def _built(self, batch: Any, whole: Any, width: int) -> Any:
        """By SGLang, which knows the form of mask that the attention of this width reads, and where it is to lie."""
        requests = len(batch.seq_lens)
        tokens = whole.draft_token.view(requests, -1)[:, 1:width].contiguous()
        parents, nodes = (part[:requests] for part in self._chain(width - 1))
        return build_eagle_verify_input(
            batch,
            batch.spec_info,
            parents,
            nodes,
            tokens,
            None,
            target_worker=self._worker.target_worker,
            topk=1,
            num_steps=width - 1,
            num_draft_tokens=width,
            tree_mask_mode=self._worker._draft_worker.tree_mask_mode,
            device=self._worker.device,
        )


def start(config: C2TConfig, server_args: Any, worker: Any, packed: bool) -> Windows | None:
    """The windows, said in the log; None: of the whole width alone. packed: the target computes no pads anyway.

    To be called before SGLang captures its graphs.
    """
    if packed and not (config.mode == "tree" and worker.device == "cpu"):
        return None
    widest = worker.speculative_num_draft_tokens
    obstacle, found = _obstacle(config, server_args, worker), widths(widest, config.mode)
    if obstacle is None and len(found) > 1:
        if not packed:
            logger.info("C2T: uniform window in widths %s", ", ".join(map(str, found)))
        return Windows(worker, found)
    if not packed:
        logger.info("C2T: uniform window of %d in every step (%s)", widest, obstacle or "there is no narrower one")
    return None


def _obstacle(config: C2TConfig, server_args: Any, worker: Any) -> str | None:
    if config.packing == "full":
        return "as asked for"
    if ranks.apart():
        return "DP attention: a step would wait until all ranks know their widths"
    if config.mode == "tree" and worker.topk == 1:
        return "at top-k 1 SGLang's draft fixes it"
    if worker.device not in ("cpu", "cuda"):
        return f"narrower ones have not been tried on {worker.device}"
    if getattr(server_args, "disaggregation_mode", None) == "prefill":
        return "a prefill server verifies nothing"
    if getattr(server_args, "enable_deterministic_inference", False):
        return "enable_deterministic_inference: seeded draws depend on the width, and it on the other requests"
    if worker.device == "cpu" and getattr(server_args, "enable_torch_compile", False):
        return "the CPU's compiled graphs have one width"
    return None
