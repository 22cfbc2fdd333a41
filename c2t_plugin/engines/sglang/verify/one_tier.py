"""Packed rows under DP attention: the same number of them on all ranks, each of which has requests of its own.

SGLang's captured graphs gather the rows of all ranks, so all have to replay the one of the same size. Out of a graph it
counts rows by requests and the width, which packed ones have not: where there is no graph for what a rank wants, all
ranks verify their whole windows, as SGLang does it.

The size is the largest that a planner of them wants, known before the step drafts (dp_attention.py). The others fill up
with their own next draft tokens, as everywhere. A rank without a request has rows of nobody: token 0, written to slot
0, which no request owns, of requests as long as one token.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.common import require_mlp_tp_gather

from c2t_plugin.engines.sglang.patches import CAN_RUN_GRAPH, PATCHES, TARGET_FORWARD
from c2t_plugin.engines.sglang.step import Step
from c2t_plugin.engines.sglang.verify.packing import PER_ROW, PackedVerify, layout_of


@dataclass
class OneTier(PackedVerify):
    """tier: rows of the step at hand on all ranks; None: all of them verify whole windows."""

    tier: int | None = None

    def fitting(self, needed: int, requests: int) -> int | None:
        """The size of the graph for so many rows; None: there is none, which is so if one of so many requests, the most
        of a rank, has no place in any; then SGLang runs that of an idle rank without a graph too."""
        found = next((size for size in self.sizes() if size >= needed), None)
        return found if found is not None and requests <= self._graphs()._ragged_capture_slots(found) else None

    @contextlib.contextmanager
    def verifying(self, batch: Any, step: Step) -> Iterator[None]:
        if self.tier is None:
            self.rows, self.ran_graph = batch.spec_info.draft_token.numel(), False
            yield
            return
        with super().verifying(batch, dataclasses.replace(step, rows=self.tier)):
            yield

    @contextlib.contextmanager
    def idling(self, batch: Any) -> Iterator[None]:
        """Within it the target's forward of this rank, which has no request, has the rows of the others."""
        if self.tier is None:
            yield
            return
        graphs, idle = self._graphs(), batch
        forward, admits = self.target_worker.forward_batch_generation, graphs.can_run_graph

        def admits_rows(forward_batch: Any) -> bool:
            # of a batch without requests SGLang would prepare the graph of a uniform window, which there is none of
            return not forward_batch.forward_mode.is_idle() and admits(forward_batch)

        def forward_nobodys(batch: Any = None, forward_batch: Any = None, **keyword: Any) -> Any:
            result = forward(None, self._nobodys(idle, forward_batch), **keyword)
            for name in PER_ROW:
                rows = getattr(result.logits_output, name)
                if rows is not None:
                    setattr(result.logits_output, name, rows[:0])
            return result

        with (
            PATCHES.during(TARGET_FORWARD, forward_nobodys, owner=self.target_worker),
            PATCHES.during(CAN_RUN_GRAPH, admits_rows, owner=graphs),
        ):
            yield

    def _nobodys(self, idle: Any, uniform: Any) -> Any:
        """The forward batch of a rank without requests. idle: the scheduler's batch of it. uniform: SGLang's own of
        that."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        rows, device = self.tier, idle.seq_lens.device
        assert rows is not None
        slots = self._graphs()._ragged_capture_slots(rows)
        # made on the device, so that nobody waits for it
        places = torch.arange(slots + 1, dtype=torch.int32, device=device)
        starts = places * (rows // slots) + places.clamp(max=rows % slots)
        tokens, positions, cache = torch.zeros(3, rows, dtype=torch.int64, device=device)
        own, made = copy.copy(idle.spec_info), copy.copy(idle)
        own.draft_token, own.positions, own.custom_mask = tokens, positions, None
        own.ragged_verify_layout = layout_of(starts.diff(), starts, rows)
        made.spec_info, made.input_ids, made.out_cache_loc = own, tokens, cache
        made.seq_lens_cpu, made.seq_lens_sum = torch.ones(slots, dtype=torch.int64), slots
        made.seq_lens = torch.ones(slots, dtype=torch.int64, device=device)
        made.orig_seq_lens, made.req_pool_indices = made.seq_lens.int(), torch.zeros_like(made.seq_lens)
        made.forward_mode, made.multimodal_inputs = ForwardMode.TARGET_VERIFY, [None] * slots
        axes = {} if uniform.mrope_positions is None else {"spec_mrope_positions": positions.expand(3, -1)}
        return ForwardBatch.init_new(
            made,
            self.target_worker.model_runner,
            capture_hidden_mode=uniform.capture_hidden_mode,
            return_hidden_states_before_norm=False,
            **axes,
        )


def obstacle(packing: str, server_args: Any, linear: Any) -> str | None:
    """Why ranks do not have one number of rows; None: they have. packing: as the option says. linear: backend of linear
    layers beside attention, or None. What SGLang asks for its own packed rows, and more
    (dspark_components/dspark_planner.py:157 of 0.5.23)."""
    for found, reason in (
        (packing == "auto", "rows, which nothing proves there, are packed if --speculative-c2t-packing names it"),
        (get_parallel().attn_tp_size > 1, "a group of ranks attends to the same requests"),
        (not _gathers(server_args), "ranks take graphs of their own sizes"),
        (not get_moe_a2a_backend().is_none(), "experts get tokens from all to all"),
        (getattr(server_args, "enable_return_routed_experts", False), "routed experts are kept of rows of nobody"),
        (linear is not None, "linear layers keep states of rows of nobody"),
    ):
        if found:
            return f"DP attention: {reason}"
    return None


def _gathers(server_args: Any) -> bool:
    """Whether the tokens of all ranks are gathered, each as many. Of 0.5.17 the function asks for the arguments."""
    asks = "server_args" in inspect.signature(require_mlp_tp_gather).parameters
    return bool(require_mlp_tp_gather(server_args) if asks else require_mlp_tp_gather())
