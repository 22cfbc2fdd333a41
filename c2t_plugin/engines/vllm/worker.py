"""The part of our workers that does not depend on the device: drafters that cut, and control of them at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from c2t_plugin.engines.vllm.standing_in import standing_in
from c2t_plugin.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _StockWorker
else:
    _StockWorker = object


class WorkerMixin(_StockWorker):
    """Over a stock worker. Its c2t_ methods are reached by `collective_rpc`."""

    def init_device(self) -> None:
        from c2t_plugin.engines.vllm import v1

        # The runner's constructor names its drafter's class.
        with standing_in(v1.substitutes()):
            super().init_device()

    def c2t_control(self, beta: float | None = None, max_depth: int | None = None) -> dict[str, Any]:
        """Change threshold and longest chain from the next draft on, both or, with ConfigError, neither.

        Returns the state: beta, max_depth, d_max, how many tokens were kept for want of finite statistics (non_finite),
        drafts begun and draft steps scored since the start.
        """
        drafter = self.model_runner.drafter
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
        return {
            "beta": float(scorer.beta),
            "max_depth": int(scorer.max_depth),
            "d_max": scorer.d_max,
            "non_finite": int(scorer.non_finite),
            "drafts": drafter.drafts,
            "draft_steps": drafter.draft_steps,
        }
