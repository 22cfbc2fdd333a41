"""The workers: SGLang's own EAGLE and STANDALONE workers, with C2T where their steps pass.

One decoding step, in the order in which SGLang calls it. The worker has plan, verify and report, the draft worker below
it the rest:

    plan      `activate_step_by_batch`: how deep this step drafts, where a planner decides (planner/)
    draft     `draft` of the draft worker: SGLang prepares the batch and runs the loop or replays its CUDA graph
    score     `draft_forward`: in that loop every token gets a confidence (drafters/, scorer)
    decide    `draft` again: how much of each draft is verified (drafters/); a `Step` goes onto the verify input
    verify    `verify`: the target computes what was decided (verify/)
    report    `verify` again: the `Step`, now complete, goes onto the result, which results.py reads on the host
    extend    `_draft_extend_for_decode`: the draft reads what was accepted. Its logits are what the first token of the
              next draft is the argmax of, so their statistics are kept for that, the seed of each request's slot.
              Plain steps do without: what they gave is read in one pass, before the next draft (behind.py)

Links behind a request's cut are taken out, so that acceptance never passes it. Output is the target's alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker, StandaloneWorkerV2

from c2t_plugin.engines.patching import Patch
from c2t_plugin.engines.sglang import args, control, ranks, startup
from c2t_plugin.engines.sglang.drafters import Drafter, drafter_class
from c2t_plugin.engines.sglang.drafters.depths import DepthSwitch
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.patches import (
    DRAFT_FORWARD,
    EAGLE_DRAFT_WORKER,
    EXTEND_GRAPH,
    PATCHES,
    STANDALONE_DRAFT_WORKER,
    STEP_DEPTH,
)
from c2t_plugin.engines.sglang.requests import all_by_their_own, limits_of, set_options
from c2t_plugin.engines.sglang.step import Step, attach, record_of, step_of
from c2t_plugin.engines.sglang.verify.layout import rows_to_compute

if TYPE_CHECKING:

    class _StockDraftWorker(EagleDraftWorker):
        """What a mixin may take for granted."""

    class _StockWorker(EAGLEWorkerV2):
        """The same for the worker."""

else:
    _StockDraftWorker = _StockWorker = object

logger = logging.getLogger(__name__)


class StepMixin(_StockWorker):
    """Over a stock worker: plan, verify and report."""

    # Of the class of the draft worker: its name in SGLang, and ours that stands for it.
    _draft_class: tuple[Patch, type]
    _draft_worker: Any
    adaptive_controller: Any
    _reqs: Sequence[Any] = ()
    # of this rank, those of prefills and without a request too
    steps = 0

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        with PATCHES.during(*self._draft_class):
            super().__init__(*positional, **keyword)

    @property
    def c2t(self) -> Parts:
        """What this server serves with; for the handlers in control.py and results.py too."""
        return cast(Parts, self._draft_worker.c2t)

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        self.adaptive_controller = startup.complete(self, args.config_of(self.server_args))
        control.publish(self.c2t)
        PATCHES.check()
        logger.info("C2T: configuration %s", json.dumps(self.c2t.configuration))

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        config = args.config_of(self.server_args)
        startup.prove(self, config, super().init_cuda_graphs)
        startup.remember(self, config)

    def forward_batch_generation(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        """A prefill, or a step, of which SGLang calls the parts that follow."""
        self._reqs, self.steps = batch.reqs, self.steps + 1
        if self.c2t.planner is not None and not batch.forward_mode.is_decode():
            self.c2t.planner.interrupt()
        self.speculative_algorithm.take_over(self.c2t, self.device)
        return super().forward_batch_generation(batch, *positional, **keyword)

    def activate_step_by_batch(self, batch_size: int) -> None:
        if self.c2t.together is not None:
            self.c2t.together.begin(self, self._reqs)
        elif isinstance(self.adaptive_controller, DepthSwitch) and batch_size:
            self.adaptive_controller.switch(self.planned_depth(self._reqs))
            self.plan_rows(len(self._reqs))

    def planned_depth(self, reqs: Sequence[Any]) -> int:
        """How deep the next step of these requests drafts."""
        parts = self.c2t
        assert parts.planner is not None
        # Recorded chains are whole. So are those of requests with a threshold of their own, among themselves: they
        # deepen no neighbour's draft.
        whole = parts.recorder is not None or all_by_their_own(parts, reqs)
        depth = parts.planner.begin(len(reqs), whole, limits_of(reqs))
        if parts.together is None:
            depth = parts.planner.depth = ranks.agree_on(depth)
        return depth

    def plan_rows(self, requests: int) -> None:
        """Have the planner choose the rows of this step's target pass, once its depth is in force."""
        planner = self.c2t.planner
        assert planner is not None
        planner.rows = ranks.agreed_rows(planner, requests)

    def _build_trivial_verify_input(self, batch: Any) -> Any:
        """SGLang's, of a step that drafts nothing."""
        verify_input = super()._build_trivial_verify_input(batch)
        if not batch.forward_mode.is_idle():
            if self.c2t.behind is not None:
                self.c2t.behind.begin(batch.spec_info)
            if self.speculative_algorithm.is_standalone():
                # It drafts without the target's hidden states, for which the stock method asks.
                verify_input.capture_hidden_mode = CaptureHiddenMode.NULL
            # as the drafts of every other depth have it; the CPU's kernel takes no other
            verify_input.draft_token = verify_input.draft_token.long()
            requests = len(batch.reqs)
            # known without a look at the device
            rows = None if self.c2t.packing is None else rows_to_compute(requests, self.c2t.packing.sizes())
            attach(verify_input, Step(torch.zeros(requests, dtype=torch.int32, device=self.device), rows=rows))
        return verify_input

    def verify(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        step, parts = step_of(batch.spec_info), self.c2t
        if step is None:
            with contextlib.nullcontext() if parts.together is None else parts.together.idling(batch):
                return super().verify(batch, *positional, **keyword)
        packing, window = parts.packing, batch.spec_info.draft_token.numel()
        computed = (lambda: window) if packing is None else (lambda: packing.rows)
        packed = contextlib.nullcontext() if packing is None else packing.verifying(batch, step)
        with (
            PATCHES.during(STEP_DEPTH, batch.spec_info.max_tree_depth - 1, owner=self),
            parts.timed("verify", computed),
            packed,
        ):
            result = super().verify(batch, *positional, **keyword)
        if packing is not None:
            # SGLang asked for a graph of the uniform window, which there is none of.
            result.can_run_cuda_graph = packing.ran_graph
        result.cap_lens = step.kept  # without roots, which the host adds (results.py)
        depth, seconds = step.depth or self.speculative_num_steps, parts.counts.lap()
        attach(result, dataclasses.replace(step, rows=computed(), depth=depth, seconds=seconds))
        return result


class DraftMixin(_StockDraftWorker):
    """Over a stock draft worker: draft, score and decide, by the mode's drafter; and the seeds of the next draft."""

    c2t: Parts
    drafter: Drafter

    def alloc_memory_pool(self, *positional: Any, **keyword: Any) -> None:
        super().alloc_memory_pool(*positional, **keyword)
        kind = drafter_class(args.config_of(self.server_args).mode)
        self.c2t = startup.prepare(
            self.server_args,
            self.speculative_algorithm.base.name,
            functools.partial(kind.scorer_of, self),
            most=self.speculative_num_draft_tokens - 1,
            topk=self.topk,
            leads=ranks.leads(),
            alone=ranks.alone(),
        )
        self.drafter = kind(self, self.c2t)

    def _capture_cuda_graphs(self) -> None:
        with self.drafter.capturing():
            super()._capture_cuda_graphs()

    def draft(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        if batch.forward_mode.is_idle():
            return super().draft(batch, *positional, **keyword)
        planner, reqs = self.c2t.planner, batch.reqs
        if planner is not None and not planner.depths:
            planner.begin(len(reqs), all_by_their_own(self.c2t, reqs))
            planner.rows = ranks.agreed_rows(planner, len(reqs))
        self.c2t.scorer.own_here = any(limits_of(reqs))
        self._catch_up(batch, batch.spec_info)
        with self.c2t.timed("draft", lambda: len(batch.reqs)), self.drafter.drafting():
            drafted = super().draft(batch, *positional, **keyword)
        return self.drafter.decide(batch, drafted)

    def draft_forward(self, forward_batch: Any) -> Any:
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        return self.drafter.loop(forward_batch, super().draft_forward)

    def _draft_extend_for_decode(self, batch: Any, result: Any, *positional: Any, **keyword: Any) -> None:
        behind = self.c2t.behind
        if batch.forward_mode.is_idle():
            return super()._draft_extend_for_decode(batch, result, *positional, **keyword)
        if behind is not None and not self.speculative_num_steps:
            behind.skip(batch, result)
            if behind.full:
                self._catch_up(batch, result.next_draft_input, ended=True)
            return
        with self._seeds_of(batch), self.c2t.timed("draft_extend", lambda: len(batch.reqs)):
            super()._draft_extend_for_decode(batch, result, *positional, **keyword)
        if self.c2t.windows is not None:
            self.c2t.windows.leave()

    def _draft_extend_for_prefill(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        with self._seeds_of(batch):
            result = super()._draft_extend_for_prefill(batch, *positional, **keyword)
        if not batch.forward_mode.is_idle():
            set_options(self.c2t, batch.req_pool_indices, batch.reqs)
            for req in batch.reqs:
                record_of(req).missed = None
        return result

    def _catch_up(self, batch: Any, draft_input: Any, ended: bool = False) -> None:
        """Have the draft read what plain steps gave, before it is asked. draft_input: the next draft's. ended: see
        Behind.late."""
        late = None if self.c2t.behind is None else self.c2t.behind.late(batch, ended)
        if late is None:
            return
        if self.c2t.planner is not None:
            # what this step takes is no step's price
            self.c2t.planner.interrupt()
        with self._seeds_of(late.batch):
            found = super()._draft_extend_for_prefill(late.batch, late.hidden, late.tails)
        late.put(found, draft_input)

    @contextlib.contextmanager
    def _seeds_of(self, batch: Any) -> Iterator[None]:
        """Keeps the statistics of the logits that a draft extend within it gives for each request of the batch."""
        seen: list[Any] = []
        graphs = getattr(self, "cuda_graph_runner_for_draft_extend", None)
        runner = self.draft_runner
        with contextlib.ExitStack() as watched:
            forward = _seeing(runner.forward, lambda output: seen.append(output.logits_output))
            watched.enter_context(PATCHES.during(DRAFT_FORWARD, forward, owner=runner))
            if graphs is not None:
                watched.enter_context(PATCHES.during(EXTEND_GRAPH, _seeing(graphs.execute, seen.append), owner=graphs))
            yield
        if not batch.forward_mode.is_idle():
            slots = batch.req_pool_indices
            # Read at once: in a CUDA graph the logits are a buffer that the next replay overwrites.
            with self.c2t.counts.classifying():
                self.c2t.scorer.write_seed(slots, seen[-1].next_token_logits[: slots.shape[0]])


def _seeing(call: Callable[..., Any], see: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def seen(*positional: Any, **keyword: Any) -> Any:
        output = call(*positional, **keyword)
        see(output)
        return output

    return seen


class C2TEagleDraftWorker(DraftMixin, EagleDraftWorker):
    """EAGLE and EAGLE-3 heads."""


class C2TStandaloneDraftWorker(DraftMixin, StandaloneDraftWorker):
    """Stand-alone draft models."""


class C2TEagleWorker(StepMixin, EAGLEWorkerV2):
    """EAGLE and EAGLE-3 with C2T."""

    _draft_class = (EAGLE_DRAFT_WORKER, C2TEagleDraftWorker)


class C2TStandaloneWorker(StepMixin, StandaloneWorkerV2):
    """Stand-alone drafts with C2T."""

    _draft_class = (STANDALONE_DRAFT_WORKER, C2TStandaloneDraftWorker)


def worker_class(base: str) -> type:
    """The worker for EAGLE, EAGLE3 or STANDALONE."""
    return C2TStandaloneWorker if base == "STANDALONE" else C2TEagleWorker
