"""C2T's own counters on /metrics, in every process that serves vLLM's.

    vllm:c2t_verify_steps_total{length="n"}   verify steps of requests with n draft tokens, 0 included
    vllm:c2t_accepted_tokens_total            draft tokens accepted, bonus tokens excluded

gamma is the mean of `length` over the steps, tau (bonus excluded) is accepted tokens per step. vLLM's own
vllm:spec_decode_num_drafts leaves out the steps of requests without a draft, so its means are those of the requests
that had one. Draft tokens are those that were verified: what the scheduler scheduled, less what adaptive verification
cut on the device (scheduler.py).
"""

from __future__ import annotations

import functools
from typing import Any

import prometheus_client

from c2t_plugin.engines.vllm.config import Settings


class VerifyCounters:
    """The counters of one engine's logger; vllm in their names lets a later engine of the process take them over."""

    def __init__(self, logger: Any) -> None:
        names = ["model_name", "engine"]
        longest = logger.vllm_config.speculative_config.num_speculative_tokens
        steps = prometheus_client.Counter(
            "vllm:c2t_verify_steps",
            "Verify steps by number of draft tokens verified.",
            [*names, "length"],
        )
        accepted = prometheus_client.Counter(
            "vllm:c2t_accepted_tokens", "Draft tokens accepted, bonus tokens excluded.", names
        )
        labels = {index: [str(value) for value in values] for index, values in logger.per_engine_labelvalues.items()}
        self.steps = {
            index: [steps.labels(*own, str(length)) for length in range(longest + 1)] for index, own in labels.items()
        }
        self.accepted = {index: accepted.labels(*own) for index, own in labels.items()}
        # Steps without drafts that are yet to be counted; below 0 where a step's output was dropped.
        self._plain = dict.fromkeys(labels, 0)

    def record(self, engine: int, drafts: Any, iteration: Any) -> None:
        """Add one iteration. drafts: vLLM's SpecDecodingStats or None. iteration: its IterationStats or None."""
        if iteration is not None:
            # one latency per request that decoded, with or without drafts
            self._plain[engine] += len(iteration.inter_token_latencies_iter)
        if drafts is not None:
            self._plain[engine] -= drafts.num_drafts
            self.accepted[engine].inc(drafts.num_accepted_tokens)
            # drafts with at least so many tokens
            reaching = [drafts.num_drafts, *drafts.num_draft_tokens_per_pos, 0]
            for length, steps in enumerate(self.steps[engine]):
                steps.inc(reaching[length] - reaching[length + 1])
        if self._plain[engine] > 0:
            self.steps[engine][0].inc(self._plain[engine])
            self._plain[engine] = 0


def install() -> None:
    """Let vLLM's Prometheus logger keep the counters of engines that use C2T. Idempotent."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    create, record = PrometheusStatLogger.__init__, PrometheusStatLogger.record
    if hasattr(create, "c2t"):
        return

    @functools.wraps(create)
    def counting_create(self: Any, vllm_config: Any, *positional: Any, **keyword: Any) -> None:
        create(self, vllm_config, *positional, **keyword)
        self.c2t_counters = None if Settings.of(vllm_config) is None else VerifyCounters(self)

    @functools.wraps(record)
    def counting_record(
        self: Any, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        record(self, scheduler_stats, iteration_stats, mm_cache_stats=mm_cache_stats, engine_idx=engine_idx)
        if self.c2t_counters is not None:
            drafts = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
            self.c2t_counters.record(engine_idx, drafts, iteration_stats)

    counting_create.c2t = True  # type: ignore[attr-defined]
    PrometheusStatLogger.__init__, PrometheusStatLogger.record = counting_create, counting_record
