"""The workers: SGLang's own EAGLE and STANDALONE workers, with every draft token scored and every chain cut.

Three facts of the stock code decide the design. At top-k 1 its draft "probabilities" are all 1, so statistics are
taken from the logits here. The first token of a draft is the argmax of logits that the *previous* iteration computed
(in draft extend), so their statistics are relayed per request slot. And the draft loop returns a fixed tuple, so scores
are kept in buffers beside it (ChainScorer).

Links behind a request's cut are taken out, so that acceptance never passes it. Output is what the target alone would
give; only which candidates are tried changes. Where the attention backend takes requests of different lengths the
target computes kept tokens only (ragged.py), elsewhere a uniform window (windows.py).

Longer than most files, as draft worker and worker share every step's state.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker, StandaloneWorkerV2
from torch import Tensor

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.sglang import args, control, lagged, ragged, results, startup, windows
from c2t_plugin.engines.sglang.construction import constructing, replaced
from c2t_plugin.engines.sglang.depths import DepthMixin, DepthSwitch
from c2t_plugin.engines.sglang.lagged import LaggedPlan
from c2t_plugin.engines.sglang.layout import cut_links
from c2t_plugin.engines.sglang.metrics import Counts
from c2t_plugin.engines.sglang.planning import StepPlanner
from c2t_plugin.engines.sglang.prebuilt import PrebuiltMixin
from c2t_plugin.engines.sglang.ragged import RaggedVerify
from c2t_plugin.engines.sglang.requests import set_options
from c2t_plugin.engines.sglang.windows import Windows
from c2t_plugin.scorer import ChainScorer
from c2t_plugin.traces.recorder import TraceRecorder

if TYPE_CHECKING:

    class _StockDraftWorker(EagleDraftWorker):
        """What a mixin may take for granted."""

    class _StockWorker(EAGLEWorkerV2):
        """The same for the worker."""

else:
    _StockDraftWorker = _StockWorker = object

logger = logging.getLogger(__name__)


class _DraftMixin(_StockDraftWorker):
    """Over a stock draft worker: scores each draft step, relays seeds, cuts the links of the verify input."""

    scorer: ChainScorer
    recorder: TraceRecorder | None = None
    counts: Counts
    planner: StepPlanner | None = None
    lagged: LaggedPlan | None = None
    windows: Windows | None = None
    configuration: dict[str, Any]
    _scoring = False
    _last_logits_output: Any = None

    def alloc_memory_pool(self, *positional: Any, **keyword: Any) -> None:
        super().alloc_memory_pool(*positional, **keyword)
        self._c2t_init()

    def _c2t_init(self) -> None:
        made = startup.prepare(
            self.server_args,
            self.speculative_algorithm.base.name,
            self._make_scorer,
            most=self.speculative_num_draft_tokens - 1,
            leads=get_tp_group().rank_in_group == 0,
        )
        self.scorer, self.counts, self.recorder = made.scorer, made.counts, made.recorder
        self.planner, self.configuration = made.planner, made.configuration
        self._wrap_draft_runner()

    def _make_scorer(self, classifier: NodeClassifier, beta: float, config: C2TConfig) -> ChainScorer:
        slots = self.req_to_token_pool.req_to_token.shape[0]
        return ChainScorer(
            classifier,
            slots=slots,
            rows=slots,
            max_depth=self.speculative_num_steps,
            beta=beta,
            device=self.device,
            keep_stats=config.trace_dir is not None,
        )

    def _wrap_draft_runner(self) -> None:
        runner = self.draft_runner
        forward = runner.forward

        @functools.wraps(forward)
        def scored_forward(*positional: Any, **keyword: Any) -> Any:
            output = forward(*positional, **keyword)
            if self._scoring:
                with self.counts.classifying():
                    self.scorer.step(output.logits_output.next_token_logits)
            else:
                self._last_logits_output = output.logits_output
            return output

        runner.forward = scored_forward

    def _capture_cuda_graphs(self) -> None:
        super()._capture_cuda_graphs()
        graph_runner = self.cuda_graph_runner_for_draft_extend
        if graph_runner is None:
            return
        execute = graph_runner.execute

        @functools.wraps(execute)
        def kept_execute(*positional: Any, **keyword: Any) -> Any:
            self._last_logits_output = execute(*positional, **keyword)
            return self._last_logits_output

        graph_runner.execute = kept_execute

    def draft_forward(self, forward_batch: Any) -> Any:
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        with self.counts.classifying():
            self.scorer.begin(forward_batch.req_pool_indices)
        self._scoring = True
        try:
            return super().draft_forward(forward_batch)
        finally:
            self._scoring = False

    def draft(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        idle = batch.forward_mode.is_idle()
        if self.planner is not None and not (self.planner.depths or idle):
            self.planner.begin(len(batch.reqs))
        with self.timed("draft", lambda: len(batch.reqs)):
            result = super().draft(batch, *positional, **keyword)
        if not idle:
            with self.counts.classifying():
                self._cut(batch, result[0] if isinstance(result, tuple) else result)
            result = self._narrowed(batch, result)
        return result

    def _narrowed(self, batch: Any, verify_input: Any) -> Any:
        return verify_input if self.windows is None else self.windows.narrow(batch, verify_input)

    def _cut(self, batch: Any, verify_input: Any) -> None:
        # A replayed graph does not count its steps.
        self.scorer.drafted(self.speculative_num_steps)
        if self.lagged is None:
            wanted, kept = self._kept(verify_input.retrieve_next_token.shape[0])
            kept = self._agree(kept)
        else:
            wanted, kept, verify_input.c2t_rows = self._clipped(batch, verify_input.draft_token_num, self.lagged)
        cut_links(verify_input.retrieve_next_token, kept)
        verify_input.c2t_kept, verify_input.c2t_wanted = kept, wanted
        verify_input.c2t_drafted = self._drafted(batch, verify_input)

    def _clipped(self, batch: Any, width: int, plan: LaggedPlan) -> tuple[Tensor, Tensor, int]:
        """What would be verified of each request's draft, what is, and the rows that the target computes for that."""
        requests = len(batch.reqs)
        rows = plan.rows([req.rid for req in batch.reqs], width)
        lengths = torch.stack([self.scorer.end(requests), self.scorer.lengths(requests, rows - requests)])
        wanted, kept = self._agree(lengths)
        plan.note(wanted)
        return wanted, kept, rows

    def plan(self, reqs: Sequence[Any]) -> int:
        """How deep the next step of these requests drafts."""
        assert self.planner is not None
        # Recorded chains are whole, and so are those of requests that ask for a threshold of their own.
        whole = self.recorder is not None or any(req.c2t_own_beta for req in reqs)
        depth = self.planner.begin(len(reqs), whole)
        if get_tp_group().world_size > 1:
            depth = self.planner.depth = int(self._agree(torch.tensor([depth], dtype=torch.int32, device=self.device)))
        return depth

    def timed(self, part: str, count: Callable[[], int]) -> contextlib.AbstractContextManager[None]:
        """Measures what happens within for the planner, in the few steps in which it wants that."""
        return contextlib.nullcontext() if self.planner is None else self.planner.timed(part, count)

    def _kept(self, rows: int) -> tuple[Tensor | None, Tensor]:
        """What would be verified of each draft without a budget, if there is one, and what is."""
        kept = self.scorer.end(rows)
        if self.planner is None:
            return None, kept
        return kept, self.planner.keep(kept, self.scorer.own_beta(rows), self.scorer.confidence(rows))

    def _drafted(self, batch: Any, verify_input: Any) -> results.Drafted | None:
        """The draft, if a request of the batch is recorded."""
        if self.recorder is None or not results.any_chosen(batch.reqs, self.recorder):
            return None
        rows, width = verify_input.retrieve_next_token.shape
        stats = self.scorer.stats(rows)
        assert stats is not None
        return results.Drafted(stats, verify_input.draft_token.view(rows, width)[:, 1:].clone())

    def _agree(self, kept: Tensor) -> Tensor:
        # Ranks may round the same logits differently; a different cut would desynchronise them.
        group = get_tp_group()
        return group.broadcast(kept, src=0) if group.world_size > 1 else kept

    def _draft_extend_for_prefill(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        result = super()._draft_extend_for_prefill(batch, *positional, **keyword)
        self._keep_seed(batch)
        if not batch.forward_mode.is_idle():
            set_options(self.scorer, batch.req_pool_indices, batch.reqs)
        return result

    def _draft_extend_for_decode(self, batch: Any, *positional: Any, **keyword: Any) -> None:
        with self.timed("up", lambda: len(batch.reqs)):
            super()._draft_extend_for_decode(batch, *positional, **keyword)
        self._keep_seed(batch)
        if self.windows is not None:
            self.windows.leave()

    def _keep_seed(self, batch: Any) -> None:
        # Read at once: in a CUDA graph the logits are a buffer that the next replay overwrites.
        output, self._last_logits_output = self._last_logits_output, None
        if not batch.forward_mode.is_idle():
            slots = batch.req_pool_indices
            with self.counts.classifying():
                self.scorer.write_seed(slots, output.next_token_logits[: slots.shape[0]])


class _VerifyMixin(control.Shown, PrebuiltMixin, DepthMixin, _StockWorker):
    """Over a stock worker: puts the scoring draft worker in place and reports what each request had verified."""

    _draft_class: type
    _draft_worker: Any
    ragged: RaggedVerify | None = None

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        with constructing(self._draft_class):
            super().__init__(*positional, **keyword)

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        config = args.config_of(self.server_args)
        self.ragged = ragged.start(config, self.server_args, self.target_worker)
        self.configuration["ragged"] = "off" if self.ragged is None else self.ragged.backend
        self._draft_worker.lagged = lagged.start(config, self.ragged, self.scorer, self.req_to_token_pool.size)
        if self.planner is not None and self.planner.depths:
            self.adaptive_controller = DepthSwitch(self, self.planner.depths)
        else:
            found = windows.start(config, self.server_args, self, packed=self.ragged is not None)
            self._draft_worker.windows = self.adaptive_controller = found
            self.configuration["widths"] = None if found is None else found.widths
        if self.planner is not None and self.ragged is not None:
            self.planner.compact, self.planner.sizes = True, self.ragged.sizes
        elif self.planner is not None:
            planned = "plans the draft's depth alone" if self.planner.depths else "verifies every node"
            logger.warning("C2T: beta auto %s, since the whole window is computed anyway", planned)
        control.publish(self)
        logger.info("C2T: configuration %s", json.dumps(self.configuration))

    def verify(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        noted = (getattr(batch.spec_info, name, None) for name in ("c2t_kept", "c2t_wanted", "c2t_drafted"))
        kept, wanted, drafted = noted
        if kept is None:
            return super().verify(batch, *positional, **keyword)
        # 0.5.17 shapes log probabilities by the worker's depth, which a narrower window's is not.
        deep = replaced(self, "speculative_num_steps", batch.spec_info.max_tree_depth - 1)
        if self.ragged is None:
            rows = batch.spec_info.draft_token.numel()
            with deep, self._draft_worker.timed("verify", lambda: rows):
                result = super().verify(batch, *positional, **keyword)
        else:
            verifying = self.ragged.verifying(batch, kept)
            with deep, self._draft_worker.timed("verify", lambda: self.ragged.rows), verifying:
                result = super().verify(batch, *positional, **keyword)
            rows = self.ragged.rows
            # SGLang asked for a graph of the uniform window, which there is none of.
            result.can_run_cuda_graph = self.ragged.ran_graph
        result.cap_lens = kept + 1
        result.c2t_wanted, result.c2t_drafted = wanted, drafted
        result.c2t_rows, result.c2t_depth = rows, self.speculative_num_steps
        result.c2t_classifier_s = self._draft_worker.counts.lap()
        return result


class C2TEagleDraftWorker(_DraftMixin, EagleDraftWorker):
    """EAGLE and EAGLE-3 heads."""


class C2TStandaloneDraftWorker(_DraftMixin, StandaloneDraftWorker):
    """Stand-alone draft models."""


class C2TEagleWorker(_VerifyMixin, EAGLEWorkerV2):
    """EAGLE and EAGLE-3 with C2T."""

    _draft_class = C2TEagleDraftWorker


class C2TStandaloneWorker(_VerifyMixin, StandaloneWorkerV2):
    """Stand-alone drafts with C2T."""

    _draft_class = C2TStandaloneDraftWorker


def worker_class(base: str) -> type:
    """The worker for EAGLE, EAGLE3 or STANDALONE."""
    return C2TStandaloneWorker if base == "STANDALONE" else C2TEagleWorker
