"""vLLM's scheduler with a planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from c2t_plugin.config import AUTO, LOWER
from c2t_plugin.engines.vllm.config import Settings
from c2t_plugin.engines.vllm.planning import Planning, cut
from c2t_plugin.engines.vllm.requests import OwnSettings
from c2t_plugin.planner import CostCurve


class PlanningScheduler(Scheduler):
    """Synchronous. Named by `scheduler_config.scheduler_cls`."""

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        super().__init__(*positional, **keyword)
        settings = Settings.of(self.vllm_config)
        assert settings is not None
        path = None if settings.curve is None else Path(settings.curve)
        curve = CostCurve.load(path) if path is not None and path.exists() else None
        self.planning = Planning(curve, path, self.num_spec_tokens, learns=settings.learn == AUTO)
        self._own = OwnSettings(settings.request_settings, self.scheduler_config.max_num_seqs)
        # else the planner may drop more
        self._exact = settings.request_settings != LOWER
        # vLLM asks it for nothing but an element
        self.dynamic_sd_lookup: Any = self.planning

    def schedule(self, *positional: Any, **keyword: Any) -> Any:
        decoding = not self.waiting and not any(request.is_prefill_chunk for request in self.running)
        self.planning.begin(decoding=decoding)
        return super().schedule(*positional, **keyword)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.planning.ran(scheduler_output.num_scheduled_tokens, drafts)
        self._judge(drafts, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        asked = self._own.of(draft_token_ids.req_ids, self.requests)
        own = [self._exact and each.threshold is not None for each in asked]
        cut(self.planning, draft_token_ids, self._takes, own)
        super().update_draft_token_ids(draft_token_ids)

    def _judge(self, drafts: Any, output: Any) -> None:
        places, tokens = output.req_id_to_index, output.sampled_token_ids
        # a request that failed or was aborted meanwhile has none
        came = [name for name in drafts if name in places and len(tokens[places[name]])]
        learnt = [name for name, own in zip(came, self._own.of(came, self.requests), strict=True) if own.learn]
        # the last of a request's tokens is the target's own
        accepted = {name: len(tokens[places[name]]) - 1 for name in learnt}
        self.planning.judged({name: len(drafts[name]) for name in learnt}, accepted)

    def _takes(self, name: str) -> bool:
        request = self.requests.get(name)
        return request is not None and not request.is_finished() and not request.is_prefill_chunk
