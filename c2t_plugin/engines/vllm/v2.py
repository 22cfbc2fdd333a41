"""Model runner V2: vLLM's own speculators, with the classifier in the place of their acceptance estimator.

With synchronous scheduling the scheduler takes as many tokens of each draft as the list that it is handed is long, so
the lists are cut. Nothing of the draft loop is copied: it is left between two draft steps, when all chains have ended.
A captured graph of the loop, or of a step, never asks.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from c2t_plugin.classifier import load_classifier
from c2t_plugin.config import LOWER, NETWORK
from c2t_plugin.engines.vllm.adaptive import StepScorer
from c2t_plugin.engines.vllm.config import Settings
from c2t_plugin.engines.vllm.draft_times import BEGIN, END, FIRST, DraftTimes
from c2t_plugin.engines.vllm.early_exit import AllCut, may_leave
from c2t_plugin.engines.vllm.planning import Drafted
from c2t_plugin.engines.vllm.requests import OwnSettings
from c2t_plugin.engines.vllm.served import ServedTraces

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator as _StockSpeculator
else:
    _StockSpeculator = object

logger = logging.getLogger("vllm.c2t")


class _ScoringMixin(_StockSpeculator):
    """Over a stock speculator: scores each draft step and ends the loop early."""

    scorer: StepScorer
    # vLLM's own until it is replaced, None without adaptive verification
    acceptance_estimator: Any
    # set by the worker where requests are recorded
    traces: ServedTraces | None = None
    drafts = draft_steps = 0
    # Of the draft under way: whether it may end early, its forwards, and how many it has at most; None: as vLLM says.
    _may_leave = False
    _forwards = 0
    _most: int | None = None
    # where a planner decides: how long drafts take, and the (requests, steps) tokens that the scheduler is not told yet
    _times: DraftTimes | None = None
    _untold: Tensor | None = None
    # whether that learns a network too
    _tells_stats = False

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        super().__init__(*positional, **keyword)
        settings = Settings.of(self.vllm_config)
        assert settings is not None
        # Here and not with the models, whose memory vLLM gives up when it sleeps.
        self.scorer = StepScorer(
            load_classifier(settings.classifier),
            rows=self.max_num_reqs,
            max_depth=self.num_speculative_steps,
            beta=settings.beta,
            device=self.device,
            keep_stats=settings.planned or settings.trace_dir is not None,
        )
        self.scorer.lower = settings.request_settings == LOWER
        self.own = OwnSettings(settings.request_settings, self.max_num_reqs)
        # by name, as vLLM sends them, requests that may have set something for themselves
        self._setting: dict[str, Any] = {}
        if settings.planned:
            self._times = DraftTimes(self.device)
        self._tells_stats = settings.learn == NETWORK
        settings.log(logger, self.method, self.num_speculative_steps, "model runner V2")

    def load_model(self, *positional: Any, **keyword: Any) -> None:
        super().load_model(*positional, **keyword)
        settings = Settings.of(self.vllm_config)
        assert settings is not None
        if settings.estimates:
            self.scorer.learn_by(self.acceptance_estimator)
        self.acceptance_estimator = SimpleNamespace(predict=self.scorer.predict, step=self.scorer.observe)

    def _run_model(self, *positional: Any, **keyword: Any) -> Any:
        if self._most is not None and self._forwards >= self._most:
            raise AllCut
        if self._may_leave and self._forwards and not self.scorer.any_alive_after(self._rows, self._forwards):
            raise AllCut
        self._forwards += 1
        return super()._run_model(*positional, **keyword)

    def propose(
        self,
        input_batch: Any,
        *positional: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **keyword: Any,
    ) -> Tensor:
        keyword |= {"dummy_run": dummy_run, "num_speculative_tokens": num_speculative_tokens}
        if dummy_run:
            return super().propose(input_batch, *positional, **keyword)
        steps = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        names, self._rows, self._forwards = input_batch.req_ids, input_batch.num_reqs, 0
        if self._times is None:
            # else a planner in the scheduler's process takes them into account
            self.scorer.limit(self.own.of(names, self._setting))
        # what is recorded is recorded whole
        recording = self.traces is not None and self.traces.any_chosen(names)
        # a planner has said how deep; the first pass is taken in any case
        self._may_leave = may_leave(self.vllm_config) and not recording and self._times is None
        self._most = max(steps, 1)
        # vLLM 0.33 asks for none where nobody would take it
        self.drafts += steps > 0
        self._mark(BEGIN)
        try:
            drafted = super().propose(input_batch, *positional, **keyword)
        except AllCut:
            # what ends a stock draft is not called; MTP's switch, the one thing it turns, is set anew at each start
            drafted, steps = self.draft_tokens[: self._rows], min(steps, self._forwards)
        finally:
            self._may_leave, self._most = False, None
        self._mark(END)
        self.draft_steps += steps
        self._untold = drafted[: self._rows, :steps]
        stats = self.scorer.stats(self._rows) if recording else None
        if self.traces is not None and stats is not None and steps == self.num_speculative_steps:
            self.traces.keep(stats, drafted.tolist(), names)
        return drafted

    def note(self, scheduler_output: Any) -> None:
        """A step is to come: which requests have ended, and which are new, with what they set for themselves."""
        for name in scheduler_output.finished_req_ids:
            self._setting.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            if getattr(new.sampling_params, "extra_args", None):
                self._setting[new.req_id] = new

    def _mark(self, moment: int) -> None:
        if self._times is not None:
            self._times.mark(moment)

    def tell(self, _: Any = None) -> Drafted | None:
        """Of the newest draft, once, what the scheduler's planner goes by; None: there is no planner. Waits for it."""
        untold, self._untold = self._untold, None
        if self._times is None or untold is None:
            return None
        said = self.scorer.said(*untold.shape).tolist()
        confidence, log_prob = ([[token[at] for token in row] for row in said] for at in range(2))
        stats = [[token[2:] for token in row] for row in said] if self._tells_stats else ()
        # what is asked for second has been waited for
        tokens = untold.tolist()
        return Drafted(confidence, *self._times.seconds(), log_prob, stats, overlaps=True, tokens=tokens)


class _HeadMixin(_ScoringMixin):
    """Over a speculator whose first pass vLLM brackets."""

    def on_prefill_end(self, num_reqs: int) -> None:
        super().on_prefill_end(num_reqs)
        self._mark(FIRST)


class _StandaloneMixin(_ScoringMixin):
    """Over a speculator that goes on after its first pass by a method of its own."""

    def _multi_step_decode(self, *positional: Any, **keyword: Any) -> None:
        self._mark(FIRST)
        super()._multi_step_decode(*positional, **keyword)


class C2TEagleSpeculator(_HeadMixin, EagleSpeculator):
    """EAGLE and EAGLE-3 heads."""


class C2TMTPSpeculator(_HeadMixin, MTPSpeculator):
    """MTP heads."""


class C2TStandaloneSpeculator(_StandaloneMixin, StandaloneARSpeculator):
    """Stand-alone draft models."""


class CuttingHandler(DraftTokensHandler):
    """Hands the scheduler draft lists of unequal length."""

    scorer: StepScorer | None = None
    _kept: Tensor | None = None

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Tensor) -> None:
        super().set_draft_tokens(input_batch, draft_tokens)
        self._kept = None if self.scorer is None else self.scorer.kept(*draft_tokens.shape)

    def get_draft_tokens(self) -> DraftTokenIds | None:
        drafts = super().get_draft_tokens()
        if drafts is None or self._kept is None:
            return drafts
        rows = zip(drafts.draft_token_ids, self._kept.tolist(), strict=True)
        return DraftTokenIds(drafts.req_ids, [row[:length] for row, length in rows])


# While vLLM builds its model runner each stands in the place of its last base.
DRAFTERS: tuple[type, ...] = (C2TEagleSpeculator, C2TMTPSpeculator, C2TStandaloneSpeculator, CuttingHandler)
