"""Traces of served requests on model runner V1: drafts as they were scored, labelled by what the target wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from c2t_plugin.engines.served_traces import start_recorder
from c2t_plugin.engines.vllm.config import Settings
from c2t_plugin.recording import is_chosen


class ServedTraces:
    """Between vLLM's model runner and the recorder.

    The runner drafts before it appends a step's tokens to its requests, so a draft is kept until `settle`, which the
    worker calls when the scheduler fetches the drafts. vLLM names ended requests at the next step, before it forgets
    them.
    """

    def __init__(self, settings: Settings, vllm_config: Any, runner: Any, top_m: int) -> None:
        self._runner = runner
        spec = vllm_config.speculative_config
        self._recorder = start_recorder(
            str(settings.trace_dir),
            settings.trace_share,
            command="vllm",
            base=settings.base,
            target=vllm_config.model_config.model,
            draft=spec.model,
            top_m=top_m,
            d_max=spec.num_speculative_tokens,
        )
        self._kept: tuple[Tensor, list[list[int]], list[str]] | None = None

    def any_chosen(self) -> bool:
        """Whether a request of the batch belongs to the recorded share."""
        return any(is_chosen(name, self._recorder.share) for name in self._runner.input_batch.req_ids)

    def keep(self, stats: Tensor, drafted: list[list[int]]) -> None:
        """One draft of the batch. stats: (rows, d_max, 4), see ChainScorer.stats. drafted: of every row, d_max ids."""
        self._kept = stats.cpu(), drafted, list(self._runner.input_batch.req_ids)

    def settle(self) -> None:
        """Hand the kept draft over, now that the runner knows its root as the newest token of each request."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        for stats, drafted, name in zip(*kept, strict=True):
            new_tokens = len(self._runner.requests[name].output_token_ids)
            # none: a part of a prompt, whose draft nobody takes
            if new_tokens and is_chosen(name, self._recorder.share):
                self._recorder.add(name, new_tokens - 1, stats, drafted)

    def finish(self, names: Iterable[str]) -> None:
        """These requests have ended; to be called while the runner still has them."""
        for name in names:
            request = self._runner.requests.get(name)
            if request is not None:
                self._recorder.finish(name, request.prompt_token_ids or [], request.output_token_ids)

    def close(self) -> None:
        """Write what is left, of requests that have not ended too: nothing is behind what they have written so far."""
        self.finish(list(self._runner.requests))
        self._recorder.close()
