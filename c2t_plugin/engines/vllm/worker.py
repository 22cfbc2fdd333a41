"""The part of our workers that does not depend on the device: drafters that cut, and control of them at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from c2t_plugin.engines.vllm.served import ServedTraces
from c2t_plugin.engines.vllm.standing_in import standing_in
from c2t_plugin.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _StockWorker
else:
    _StockWorker = object


class WorkerMixin(_StockWorker):
    """Over a stock worker. Its c2t_ methods are reached by `collective_rpc`."""

    def init_device(self) -> None:
        if self.use_v2_model_runner:
            from c2t_plugin.engines.vllm.v2 import substitutes
        else:
            from c2t_plugin.engines.vllm.v1 import substitutes
        # The runner's constructor names the classes of its drafter.
        with standing_in(substitutes()):
            super().init_device()

    def load_model(self, *positional: Any, **keyword: Any) -> None:
        super().load_model(*positional, **keyword)
        adaptive = self.vllm_config.speculative_config.enable_adaptive_verification
        if self.use_v2_model_runner and not adaptive:
            self.model_runner.draft_tokens_handler.scorer = self.model_runner.speculator.scorer

    def execute_model(self, scheduler_output: Any, *positional: Any, **keyword: Any) -> Any:
        traces = self._traces()
        if traces is not None:
            traces.finish(scheduler_output.finished_req_ids)
        return super().execute_model(scheduler_output, *positional, **keyword)

    def take_draft_token_ids(self) -> Any:
        traces = self._traces()
        if traces is not None:
            traces.settle()
        return super().take_draft_token_ids()

    def shutdown(self) -> None:
        # also called on a worker whose start has failed
        traces = self._traces() if self.model_runner is not None else None
        if traces is not None:
            traces.close()
        super().shutdown()

    def _traces(self) -> ServedTraces | None:
        return None if self.use_v2_model_runner else self.model_runner.drafter.traces

    def c2t_control(self, beta: float | None = None, max_depth: int | None = None) -> dict[str, Any]:
        """Change threshold and longest chain from the next draft on, both or, with ConfigError, neither.

        Returns the state: beta, max_depth, d_max, how many tokens were kept for want of finite statistics (non_finite),
        and what the runner counted since the start, V1: drafts begun and draft steps scored; V2: requests by number of
        drafts verified, and draft tokens accepted.
        """
        runner = self.model_runner
        drafter = runner.speculator if self.use_v2_model_runner else runner.drafter
        scorer = drafter.scorer
        previous = int(scorer.max_depth)
        if max_depth is not None:
            scorer.set_max_depth(max_depth)
        try:
            if beta is not None:
                scorer.set_beta(beta)
        except ConfigError:
            scorer.set_max_depth(previous)
            raise
        counted = (
            {"verified": scorer.verified.tolist(), "accepted": int(scorer.accepted)}
            if self.use_v2_model_runner
            else {"drafts": drafter.drafts, "draft_steps": drafter.draft_steps}
        )
        return {
            "beta": float(scorer.beta),
            "max_depth": int(scorer.max_depth),
            "d_max": scorer.d_max,
            "non_finite": int(scorer.non_finite),
            **counted,
        }
