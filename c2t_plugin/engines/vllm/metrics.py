"""C2T's own counters on /metrics, in every process that serves vLLM's.

    vllm:c2t_verify_steps_total{length="n"}   verify steps of requests with n draft tokens, 0 included
    vllm:c2t_accepted_tokens_total            draft tokens accepted, bonus tokens excluded
    vllm:c2t_classifier_seconds_total         statistics, confidences and cuts, where a planner decides
    vllm:c2t_learnt_tokens, ...               what a planner has learnt, see engines/figures.py

Verified tokens a step are the mean of `length`, the accept length is accepted tokens a step and one. vLLM's own
vllm:spec_decode_num_drafts leaves out the steps of requests without a draft, so its means are those of the requests
that had one. Draft tokens are those that were verified: what the scheduler scheduled, less what adaptive verification
cut on the device. The scheduler counts what has no draft (verified.py), as of several API servers each sees its own
requests and only one is told of a step's drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import prometheus_client

from c2t_plugin.engines.figures import GAUGES, figures
from c2t_plugin.engines.patching import ATTRIBUTE
from c2t_plugin.engines.vllm.config import Settings

# Of statistics that a scheduler sends to where metrics are: LoRA's, which is refused beside C2T. They are whole
# numbers, so that these are millionths.
CARRIER, PREFIX, MILLION = "waiting_lora_adapters", "c2t:", 1e6
SECONDS, PLAIN = "classifier_seconds", "plain_steps"


def packed(state: dict[str, Any]) -> dict[str, int]:
    """What a planner has learnt, as statistics of a scheduler carry it. state: see StepPlanner.state."""
    return {
        PREFIX + ",".join([name, *labels.values()]): round(value * MILLION) for name, value, labels in figures(state)
    }


def classified(seconds: float) -> dict[str, int]:
    """The same of the classifier's time since it was last said; nothing of none."""
    return {PREFIX + SECONDS: round(seconds * MILLION)} if seconds else {}


def plain(steps: int) -> dict[str, int]:
    """The same of verify steps of requests without a draft; nothing of none."""
    return {PREFIX + PLAIN: steps} if steps else {}


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
        seconds = prometheus_client.Counter(
            f"vllm:c2t_{SECONDS}", "Time for statistics, confidences and cuts, where a planner decides.", names
        )
        self.accepted = {index: accepted.labels(*own) for index, own in labels.items()}
        self.seconds = {index: seconds.labels(*own) for index, own in labels.items()}
        self._gauges = {
            name: prometheus_client.Gauge(f"vllm:c2t_{name}", text, [*names, *more], multiprocess_mode="mostrecent")
            for name, text, more in GAUGES
        }
        self._labels = logger.per_engine_labelvalues

    def tell(self, engine: int, sent: dict[str, int]) -> None:
        """What a scheduler of ours has just said. sent: see `packed`, `classified` and `plain`."""
        for key, value in sent.items():
            if key == PREFIX + SECONDS:
                self.seconds[engine].inc(value / MILLION)
            elif key == PREFIX + PLAIN:
                self.steps[engine][0].inc(value)
            elif key.startswith(PREFIX):
                name, *labels = key.removeprefix(PREFIX).split(",")
                own = (str(label) for label in self._labels[engine])
                self._gauges[name].labels(*own, *labels).set(value / MILLION)

    def record(self, engine: int, drafts: Any) -> None:
        """Add the drafts of one step. drafts: vLLM's SpecDecodingStats, or None where there was none."""
        if drafts is None:
            return
        self.accepted[engine].inc(drafts.num_accepted_tokens)
        # drafts with at least so many tokens
        reaching = [drafts.num_drafts, *drafts.num_draft_tokens_per_pos, 0]
        for length, steps in enumerate(self.steps[engine]):
            steps.inc(reaching[length] - reaching[length + 1])


def creating(stock: Callable[..., None]) -> Callable[..., None]:
    """The constructor of vLLM's Prometheus logger, which gives those of engines that use C2T its counters."""

    @functools.wraps(stock)
    def create(self: Any, vllm_config: Any, *positional: Any, **keyword: Any) -> None:
        stock(self, vllm_config, *positional, **keyword)
        setattr(self, ATTRIBUTE, None if Settings.of(vllm_config) is None else VerifyCounters(self))

    return create


def recording(stock: Callable[..., None]) -> Callable[..., None]:
    """What vLLM's Prometheus logger notes an iteration with, which keeps them."""

    @functools.wraps(stock)
    def record(
        self: Any, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        stock(self, scheduler_stats, iteration_stats, mm_cache_stats=mm_cache_stats, engine_idx=engine_idx)
        counters: VerifyCounters | None = getattr(self, ATTRIBUTE)
        if counters is not None:
            drafts = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
            counters.record(engine_idx, drafts)
            counters.tell(engine_idx, getattr(scheduler_stats, CARRIER, {}))

    return record
