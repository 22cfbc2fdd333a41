"""The workers: SGLang's own EAGLE and STANDALONE workers, with every draft token scored and every chain cut.

Three facts of the stock code decide the design. At top-k 1 its draft "probabilities" are all 1, so statistics are
taken from the logits here. The first token of a draft is the argmax of logits that the *previous* iteration computed
(in draft extend), so their statistics are relayed per request slot. And the draft loop returns a fixed tuple, so scores
are kept in buffers beside it (ChainScorer).

Links behind a request's cut are taken out, so that acceptance never passes it. Output is what the target alone would
give; only which candidates are tried changes. Where the attention backend takes requests of different lengths the
target computes kept tokens only (ragged.py), elsewhere the uniform window.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker, StandaloneWorkerV2
from torch import Tensor

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.checkpoints import find_classifier, load_fitting_classifier
from c2t_plugin.engines.sglang import args, control, ragged, results
from c2t_plugin.engines.sglang.layout import cut_links
from c2t_plugin.engines.sglang.metrics import Counts, Exporter
from c2t_plugin.engines.sglang.ragged import RaggedVerify
from c2t_plugin.engines.sglang.requests import RequestOptions
from c2t_plugin.policies.chain import ChainScorer
from c2t_plugin.recording import TraceRecorder

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
    configuration: dict[str, Any]
    _scoring = False
    _last_logits_output: Any = None

    def alloc_memory_pool(self, *positional: Any, **keyword: Any) -> None:
        super().alloc_memory_pool(*positional, **keyword)
        self._c2t_init()

    def _c2t_init(self) -> None:
        config = args.config_of(self.server_args)
        base = self.speculative_algorithm.base.name
        path, origin = find_classifier(config, base.lower(), self.server_args.speculative_draft_model_path)
        classifier = load_fitting_classifier(path, config)
        spec = classifier.spec
        beta = spec.suggested_beta if config.beta is None else config.beta
        self.scorer = self._make_scorer(classifier, beta, config)
        self.configuration = {
            **dataclasses.asdict(config),
            "base": base,
            "d_max": self.scorer.d_max,
            "beta": beta,
            "classifier": str(path),
            "classifier_origin": origin,
            "features": spec.features,
            "top_m": spec.top_m,
        }
        exporter = None
        if get_tp_group().rank_in_group == 0:
            if config.trace_dir is not None:
                self.recorder = results.start_recorder(config, self.server_args, base, spec, self.scorer.d_max)
            if self.server_args.enable_metrics:
                exporter = Exporter({"model_name": str(self.server_args.served_model_name)})
        self.counts = Counts(self.speculative_num_draft_tokens - 1, exporter)
        self._wrap_draft_runner()
        logger.info(
            "C2T: base %s, %s, beta %s, classifier %s (%s; features %s, top-M %d)",
            base,
            self._shape(),
            beta,
            path,
            origin,
            ", ".join(spec.features),
            spec.top_m,
        )
        if origin.startswith("shipped"):
            logger.warning("C2T: this classifier was fitted on another pair; fit your own: c2t collect, then c2t fit")

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

    def _shape(self) -> str:
        return f"chains of at most {self.scorer.d_max}"

    def _wrap_draft_runner(self) -> None:
        runner = self.draft_runner
        forward = runner.forward

        @functools.wraps(forward)
        def scored_forward(*positional: Any, **keyword: Any) -> Any:
            output = forward(*positional, **keyword)
            if self._scoring:
                self.scorer.step(output.logits_output.next_token_logits)
            else:
                self._last_logits_output = output.logits_output
            return output

        runner.forward = scored_forward

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        graph_runner = getattr(self, "cuda_graph_runner_for_draft_extend", None)
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
        self.scorer.begin(forward_batch.req_pool_indices)
        self._scoring = True
        try:
            return super().draft_forward(forward_batch)
        finally:
            self._scoring = False

    def draft(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        result = super().draft(batch, *positional, **keyword)
        verify_input = result[0] if isinstance(result, tuple) else result
        if not batch.forward_mode.is_idle():
            kept = self._agree(self.scorer.end(verify_input.retrieve_next_token.shape[0]))
            cut_links(verify_input.retrieve_next_token, kept)
            verify_input.c2t_kept = kept
            verify_input.c2t_drafted = self._drafted(batch, verify_input)
        return result

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
            options = [RequestOptions.of(req.sampling_params.custom_params) for req in batch.reqs]
            thresholds, longest = [each.threshold for each in options], [each.longest for each in options]
            self.scorer.set_requests(batch.req_pool_indices, thresholds, longest)
        return result

    def _draft_extend_for_decode(self, batch: Any, *positional: Any, **keyword: Any) -> None:
        super()._draft_extend_for_decode(batch, *positional, **keyword)
        self._keep_seed(batch)

    def _keep_seed(self, batch: Any) -> None:
        # Read at once: in a CUDA graph the logits are a buffer that the next replay overwrites.
        output, self._last_logits_output = self._last_logits_output, None
        if not batch.forward_mode.is_idle():
            slots = batch.req_pool_indices
            self.scorer.write_seed(slots, output.next_token_logits[: slots.shape[0]])


class _VerifyMixin(_StockWorker):
    """Over a stock worker: puts the scoring draft worker in place and reports what each request had verified."""

    _draft_class: type
    _draft_worker: Any
    ragged: RaggedVerify | None = None

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        with _constructing(self._draft_class):
            super().__init__(*positional, **keyword)

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        runner = self.target_worker.model_runner
        choice = ragged.choose(args.config_of(self.server_args), self.server_args, runner)
        ragged.prepare(runner.spec_algorithm, choice)
        if choice.backend is None:
            logger.info("C2T: verification over the uniform width (%s)", choice.reason)
        else:
            self.ragged = RaggedVerify(self.target_worker, self.speculative_num_draft_tokens, choice.backend)
            logger.info("C2T: verification of kept tokens only, ragged %s (%s)", choice.backend, choice.reason)
        self.configuration["ragged"] = choice.backend or "off"
        control.publish(self)
        logger.info("C2T: configuration %s", json.dumps(self.configuration))

    def verify(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        kept, drafted = (getattr(batch.spec_info, name, None) for name in ("c2t_kept", "c2t_drafted"))
        if kept is None:
            return super().verify(batch, *positional, **keyword)
        rows = batch.spec_info.draft_token.numel()
        if self.ragged is None:
            result = super().verify(batch, *positional, **keyword)
        else:
            with self.ragged.verifying(batch, kept):
                result = super().verify(batch, *positional, **keyword)
            rows = self.ragged.rows
            # SGLang asked for a graph of the uniform window, which there is none of.
            result.can_run_cuda_graph = self.ragged.ran_graph
        result.cap_lens = kept + 1
        result.c2t_drafted, result.c2t_rows = drafted, rows
        return result

    @property
    def scorer(self) -> ChainScorer:
        return self._draft_worker.scorer

    @property
    def recorder(self) -> TraceRecorder | None:
        return self._draft_worker.recorder

    @property
    def counts(self) -> Counts:
        return self._draft_worker.counts

    @property
    def configuration(self) -> dict[str, Any]:
        """What runs, every option resolved."""
        return self._draft_worker.configuration


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


@contextlib.contextmanager
def _constructing(draft_class: type) -> Iterator[None]:
    """The stock constructors name their draft class; meanwhile that name means ours."""
    stock = draft_class.__bases__[-1]
    module = sys.modules[stock.__module__]
    setattr(module, stock.__name__, draft_class)
    try:
        yield
    finally:
        setattr(module, stock.__name__, stock)


def worker_class(base: str) -> type:
    """The worker for EAGLE, EAGLE3 or STANDALONE."""
    return C2TStandaloneWorker if base == "STANDALONE" else C2TEagleWorker
