"""How many draft tokens were verified, none included.

vLLM's statistics know nothing of a request without a draft: such steps are counted here, where all requests are.
Under adaptive verification vLLM schedules whole drafts and cuts them on the device, so its statistics would take all
of them for verified. The numbers come from the device with the sampled tokens of the same step. The statistics leave
out what a grammar has refused, by a number per request; what was cut is left out by the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput, async_copy_to_np, stream

from c2t_plugin.engines.patching import ATTRIBUTE
from c2t_plugin.engines.vllm.handed import Handed
from c2t_plugin.engines.vllm.metrics import CARRIER, plain
from c2t_plugin.engines.vllm.patches import CORE, PATCHES

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _StockScheduler
else:
    _StockScheduler = object


class VerifiedOutput(AsyncModelRunnerOutput):
    """Around a step's output: its result has what was verified of each request, see Handed."""

    def __init__(self, output: AsyncOutput, copy_stream: torch.cuda.Stream, main_stream: torch.cuda.Stream) -> None:
        self._output = output
        # That stream has waited for the sampler already, and must not wait for the drafter, which runs by now.
        with stream(copy_stream, main_stream):
            self._rejected = async_copy_to_np(output.sampler_output.num_rejected)
            output.copy_event.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        found = self._output.get_output()
        accepted = (max(len(tokens) - 1, 0) for tokens in found.sampled_token_ids)
        verified = (kept + lost for kept, lost in zip(accepted, self._rejected.tolist(), strict=True))
        setattr(found, ATTRIBUTE, Handed(verified=dict(zip(found.req_ids, verified, strict=True))))
        return found

    def get_kv_connector_output(self) -> Any:
        """Abstract in vLLM 0.33; 0.32 does not ask for it."""
        return self._output.get_kv_connector_output()


class CountingMixin(_StockScheduler):
    """Over a stock scheduler; its statistics are all that changes."""

    # until the next statistics
    _plain = 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        verified = Handed.of(model_runner_output).verified
        if verified is not None:
            scheduler_output.num_invalid_spec_tokens = {
                name: len(tokens) - verified[name] for name, tokens in drafts.items()
            }
        without = [name for name in scheduler_output.num_scheduled_tokens if not drafts.get(name)]
        self._plain += sum(self._decoded(name, model_runner_output) for name in without)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _decoded(self, name: str, output: ModelRunnerOutput) -> bool:
        """Whether a request got a token that is not its first."""
        request = self.requests.get(name)
        if request is None or request.is_finished() or not request.num_output_tokens:
            return False
        tokens = output.sampled_token_ids
        return bool(tokens) and len(tokens[output.req_id_to_index[name]]) > 0

    def make_stats(self, *positional: Any, **keyword: Any) -> Any:
        stats = super().make_stats(*positional, **keyword)
        if stats is not None:
            getattr(stats, CARRIER).update(plain(self._plain))
            self._plain = 0
        return stats


class CountingScheduler(CountingMixin, Scheduler):
    """Synchronous. handed: vLLM's DraftTokenIds of the newest step, until it takes them; None: it asks workers."""

    handed: Any = None

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        super().__init__(*positional, **keyword)
        PATCHES.apply(CORE)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.handed = Handed.of(model_runner_output).drafts
        return super().update_from_output(scheduler_output, model_runner_output)


class AsyncCountingScheduler(CountingMixin, AsyncScheduler):
    """Asynchronous."""
