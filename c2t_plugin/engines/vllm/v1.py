"""Model runner V1: vLLM's own proposers, with every draft token scored and each request's chain cut.

The stock loop calls the draft model's `compute_logits` once per draft step, and the runner takes a list of unequally
long drafts from `propose` as well as a tensor. So nothing of the loop is copied: logits are scored as they pass, and
what `propose` returns is cut. The slots behind a cut hold keys of dropped tokens until the next draft's first pass,
which feeds every scheduled token again and so writes over them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

from c2t_plugin.classifier import load_classifier
from c2t_plugin.config import LOWER, NETWORK
from c2t_plugin.engines.host_scorer import HostScorer
from c2t_plugin.engines.vllm.behind import Behind, Late, Plain, reads_later
from c2t_plugin.engines.vllm.config import Settings
from c2t_plugin.engines.vllm.device_scorer import DeviceScorer
from c2t_plugin.engines.vllm.early_exit import AllCut, may_leave
from c2t_plugin.engines.vllm.ending import Ending
from c2t_plugin.engines.vllm.patches import COMPUTE_LOGITS, PATCHES
from c2t_plugin.engines.vllm.planning import Drafted
from c2t_plugin.engines.vllm.requests import OwnSettings
from c2t_plugin.engines.vllm.served import ServedTraces
from c2t_plugin.planner import OwnLimits

if TYPE_CHECKING:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as _StockProposer
else:
    _StockProposer = object

logger = logging.getLogger("vllm.c2t")


class _ChainMixin(_StockProposer):
    """Over a stock proposer: scores each draft step, ends the loop early, returns one list of tokens per request."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        settings = Settings.of(vllm_config)
        assert settings is not None
        self._runner = runner
        self._may_leave = may_leave(vllm_config)
        classifier = load_classifier(settings.classifier)
        sizes = {
            "rows": vllm_config.scheduler_config.max_num_seqs,
            "max_depth": self.speculative_config.num_speculative_tokens,
        }
        # the scheduler's planner learns from them
        self._tells_stats = settings.planned and settings.learn == NETWORK
        keep_stats = settings.trace_dir is not None or self._tells_stats
        self.scorer: HostScorer | DeviceScorer = (
            HostScorer(classifier, **sizes, beta=settings.beta, keep_stats=keep_stats)
            if device.type == "cpu"
            else DeviceScorer(classifier, **sizes, beta=settings.beta, device=device, keep_stats=keep_stats)
        )
        self._chosen: Tensor | None = None
        # set by the worker where requests are recorded
        self.traces: ServedTraces | None = None
        self.drafts = self.draft_steps = 0
        # seconds of `propose`, and within them of statistics, confidences and cuts; on a GPU nobody's clock tells
        self.draft_s = 0.0
        self.classifier_s: float | None = 0.0 if isinstance(self.scorer, HostScorer) else None
        self.scorer.lower = settings.request_settings == LOWER
        self.own = OwnSettings(settings.request_settings, sizes["rows"])
        self._planned = settings.planned
        # for the planner in the scheduler's process, until the scheduler takes the drafts
        self.drafted: Drafted | None = None
        # whether vLLM has asked for a draft since the scheduler took the last
        self._asked = False
        self.ending = Ending()
        # of plain steps, what was not read; None: each is read at once
        self.behind: Behind | None = None
        self._recording = self._spared = False
        self._scored = 0
        self._started = self._extend_s = 0.0
        self._sampled: list[tuple[Tensor, Tensor | None]] = []
        settings.log(logger, self.method, self.scorer.d_max, "model runner V1")

    def load_model(self, *positional: Any, **keyword: Any) -> None:
        super().load_model(*positional, **keyword)
        PATCHES.on(COMPUTE_LOGITS, self.model, self._scoring)

    @functools.cached_property
    def _vocabulary(self) -> Tensor | None:
        """Of the target's vocabulary, those that the draft's head has; None: all."""
        # By the first draft, and not with the models, whose memory vLLM gives up when it sleeps.
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        return None if offsets is None else (torch.arange(len(offsets), device=offsets.device) + offsets).detach()

    def initialize_attn_backend(self, *positional: Any, **keyword: Any) -> None:
        super().initialize_attn_backend(*positional, **keyword)
        if self._planned and reads_later(self.vllm_config):
            shares = self.vllm_config.cache_config.enable_prefix_caching
            requests = self.vllm_config.scheduler_config.max_num_seqs
            self.behind = Behind(self.block_size if shares else None, requests, self.max_num_tokens)

    def _scoring(self, compute_logits: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute_logits)
        def scored(*positional: Any, **keyword: Any) -> Any:
            logits = compute_logits(*positional, **keyword)
            # At once: probabilistic drafting divides these logits by the temperature in place.
            self._score(logits, self._vocabulary)
            return logits

        return scored

    def _score(self, logits: Tensor, vocabulary: Tensor | None = None) -> None:
        """vocabulary: of these logits those that the draft's head has; None: all of them."""
        first = self._scored == 0
        self._scored += 1
        self.draft_steps += 1
        logits = logits if vocabulary is None else logits[:, vocabulary]
        if self._spared:
            self._chosen = logits.argmax(dim=-1)
            return
        with self._classifying():
            self._chosen = self.scorer.score(logits, first=first)

    @contextlib.contextmanager
    def _classifying(self) -> Iterator[None]:
        """Around what the host computes for C2T itself."""
        if self.classifier_s is None:
            yield
            return
        started = time.perf_counter()
        yield
        self.classifier_s += time.perf_counter() - started

    def _greedy_sample(self, hidden_states: Tensor) -> Tensor:
        if not isinstance(self.scorer, HostScorer):
            return super()._greedy_sample(hidden_states)
        model, vocabulary = self.model, self._vocabulary
        if vocabulary is not None and isinstance(model, Eagle3LlamaForCausalLM):
            # vLLM would scatter these among all tokens of the target, to look there for the largest
            self._score(model.logits_processor(model.lm_head, hidden_states))
        else:
            model.compute_logits(hidden_states)
        assert self._chosen is not None
        return self._chosen if vocabulary is None else vocabulary[self._chosen]

    def _sample_draft_tokens(self, *positional: Any, **keyword: Any) -> tuple[Tensor, Tensor | None]:
        sampled = super()._sample_draft_tokens(*positional, **keyword)
        if not self._sampled:
            self._extend_s = time.perf_counter() - self._started
        self._sampled.append(sampled)
        # what is recorded is recorded whole
        may_leave = self._may_leave and not self._recording and self._scored < self.num_speculative_tokens
        if may_leave and self._ends():
            raise AllCut
        return sampled

    def _ends(self) -> bool:
        """Whether no chain may grow, or one more token of each does not pay."""
        if self._spared:
            return False
        with self._classifying():
            if not self.scorer.any_alive():
                return True
            return isinstance(self.scorer, HostScorer) and not self.ending.goes_on(self.scorer)

    def propose(self, num_speculative_tokens: int, *positional: Any, **keyword: Any) -> list[list[int]]:
        self._asked, began, classified = True, time.perf_counter(), self.classifier_s or 0.0
        found = self._propose(num_speculative_tokens, *positional, **keyword)
        ended = time.perf_counter()
        self.draft_s += ended - began
        if self._planned:
            none: list[list[float]] = [[math.nan] * self._scored for _ in found]
            scored = self._scored and not self._spared
            confidence = self.scorer.confidence(len(found)).tolist() if scored else none
            log_prob, stats = none, []
            if scored and isinstance(self.scorer, HostScorer):
                log_prob = self.scorer.log_prob(len(found)).tolist()
                if self._tells_stats and (known := self.scorer.stats(len(found))) is not None:
                    stats = known[..., 2:].tolist()
            classifier_s = (self.classifier_s or 0.0) - classified
            self.drafted = Drafted(confidence, self._extend_s, ended - self._started, log_prob, stats, classifier_s)
        return found

    def tell(self, drafts: Any) -> Drafted | None:
        """Of the newest draft, once, what the scheduler's planner goes by; None: there is no planner. drafts: the
        DraftTokenIds of it, which are emptied where vLLM asked for none."""
        if not self._asked:
            # One text is nearly as long as the draft can read, and vLLM hands over zeros for all of the batch.
            drafts.draft_token_ids = [[] for _ in drafts.req_ids]
            self.drafted = Drafted([[] for _ in drafts.req_ids], 0.0, 0.0) if self._planned else None
        drafted, self.drafted, self._asked = self.drafted, None, False
        return drafted

    def _propose(self, num_speculative_tokens: int, *positional: Any, **keyword: Any) -> list[list[int]]:
        self._scored, self._sampled, self._started, self._extend_s = 0, [], time.perf_counter(), 0.0
        self.drafts += num_speculative_tokens > 0
        with self._classifying():
            self._limit()
        self._recording = self.traces is not None and self.traces.any_chosen(self._runner.input_batch.req_ids)
        # a threshold set at run time cuts by scores
        self._spared = not (self.ending.scores or self._recording or float(self.scorer.beta) > 0.0)
        try:
            drafted = self._drafted(num_speculative_tokens, *positional, **keyword)
        except AllCut:
            drafted = torch.stack([tokens for tokens, _ in self._sampled], dim=1)
            probs = [each for _, each in self._sampled if each is not None]
            if probs:
                self._last_draft_probs = torch.stack(probs, dim=1)
        self._sampled = []
        if self._scored == 0 or self._spared:
            return drafted[:, : int(self.scorer.max_depth)].tolist()
        stats = self.scorer.stats(drafted.shape[0]) if self._recording else None
        if self.traces is not None and stats is not None and self._scored == self.scorer.d_max:
            self.traces.keep(stats, drafted.tolist(), self._runner.input_batch.req_ids)
        with self._classifying():
            kept = self.scorer.end(drafted.shape[0]).tolist()
            return [row[:length] for row, length in zip(drafted.tolist(), kept, strict=True)]

    def _limit(self) -> None:
        """What requests have set for themselves, and by what their drafts end."""
        names = self._runner.input_batch.req_ids
        own = self.own.of(names, self._runner.requests)
        self.scorer.limit(own)
        self.ending.begin(names, [OwnLimits.of(each, lower=self.scorer.lower) for each in own])

    def _drafted(self, depth: int, *positional: Any, **given: Any) -> Tensor:
        """As vLLM's `propose`, but that tokens of plain steps are kept, and read before the next draft."""
        if self.behind is None:
            return super().propose(depth, *positional, **given)
        batch, running = given["common_attn_metadata"], self._runner.input_batch
        names, starts = running.req_ids, running.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        self.behind.forget(self._runner.requests)
        if depth == 0 and batch.max_query_len == 1:
            return self._skip(dict(zip(names, starts, strict=True)), given)
        late = self.behind.late(names, dict(zip(names, starts, strict=True)))
        if late is not None:
            self._catch_up(late, given["target_token_ids"][batch.query_start_loc[:-1].long()], given)
        # a draft is not said to have taken that too
        self._started = time.perf_counter()
        return super().propose(depth, *positional, **given)

    def _skip(self, starts: dict[str, int], given: dict[str, Any]) -> Tensor:
        """In the place of a draft pass of a plain step. starts: of each request, the position of its token."""
        assert self.behind is not None
        requests = len(starts)
        states, slots = given["target_hidden_states"], given["common_attn_metadata"].slot_mapping[:requests]
        step = Plain(given["target_token_ids"], given["target_positions"], states, slots)
        now = self.behind.keep(list(starts), starts.values(), step)
        late = self.behind.late(list(starts), {name: starts[name] + 1 for name in now}) if now else None
        if late is not None:
            self._catch_up(late, given["next_token_ids"], given)
        return torch.empty(requests, 0, dtype=torch.int64, device=self.device)

    def _catch_up(self, late: Late, following: Tensor, given: dict[str, Any]) -> None:
        """following: (requests of the batch,) the token after what each has missed."""
        tokens, positions, hidden, _ = late.missed
        changed = {
            "target_token_ids": tokens,
            "target_positions": positions,
            "target_hidden_states": hidden,
            "next_token_ids": following[torch.tensor(late.rows).to(following.device)],
            "token_indices_to_sample": None,
            "num_rejected_tokens_gpu": None,
            "common_attn_metadata": late.attention(given["common_attn_metadata"]),
        }
        super().propose(0, **(given | changed))


class C2TEagleProposer(_ChainMixin, EagleProposer):
    """EAGLE, EAGLE-3 and MTP heads."""


class C2TDraftModelProposer(_ChainMixin, DraftModelProposer):
    """Stand-alone draft models."""


# While vLLM builds its model runner each stands in the place of its last base.
DRAFTERS: tuple[type, ...] = (C2TEagleProposer, C2TDraftModelProposer)
