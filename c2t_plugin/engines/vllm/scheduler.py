"""Schedulers that count, under adaptive verification, the draft tokens that were verified.

vLLM schedules whole drafts there and cuts them on the device, so its statistics would take all of them for verified.
They leave out what a grammar has refused, by a number per request; what was cut is left out by the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from c2t_plugin.engines.vllm.config import VERIFIED

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _StockScheduler
else:
    _StockScheduler = object


class _CountingMixin(_StockScheduler):
    """Over a stock scheduler; its statistics are all that changes."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        verified = getattr(model_runner_output, VERIFIED, None)
        if verified is not None:
            scheduled = scheduler_output.scheduled_spec_decode_tokens
            scheduler_output.num_invalid_spec_tokens = {
                name: len(tokens) - verified[name] for name, tokens in scheduled.items()
            }
        return super().update_from_output(scheduler_output, model_runner_output)


class CountingScheduler(_CountingMixin, Scheduler):
    """Synchronous."""


class AsyncCountingScheduler(_CountingMixin, AsyncScheduler):
    """Asynchronous."""
