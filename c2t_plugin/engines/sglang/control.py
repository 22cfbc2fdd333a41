"""Run-time control over SGLang's own routes: read and change beta and the longest chain of a running server.

POST /set_internal_state {"server_args": {"speculative_c2t_beta": 0.4, "speculative_c2t_max_depth": 3}}
{"speculative_c2t_auto": 1} returns to the planner, where the server was started with --speculative-c2t-beta auto.
GET /get_server_info lists them under "c2t", with what has been counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from c2t_plugin.config import AUTO
from c2t_plugin.engines.sglang.metrics import Counts
from c2t_plugin.engines.sglang.planning import StepPlanner
from c2t_plugin.errors import ConfigError
from c2t_plugin.scorer import ChainScorer
from c2t_plugin.traces.recorder import TraceRecorder

logger = logging.getLogger(__name__)

BETA = "speculative_c2t_beta"
MAX_DEPTH = "speculative_c2t_max_depth"
AUTO_BETA = "speculative_c2t_auto"


class Shown:
    """Over a worker: what the handlers here and results.py ask it for, all of it its draft worker's."""

    _draft_worker: Any

    @property
    def scorer(self) -> ChainScorer:
        return self._draft_worker.scorer

    @property
    def recorder(self) -> TraceRecorder | None:
        return self._draft_worker.recorder

    @property
    def planner(self) -> StepPlanner | None:
        return self._draft_worker.planner

    @property
    def counts(self) -> Counts:
        return self._draft_worker.counts

    @property
    def configuration(self) -> dict[str, Any]:
        """What runs, every option resolved."""
        return self._draft_worker.configuration


def install() -> None:
    """Wrap the scheduler's two handlers, once per process. Called before the scheduler binds them."""
    from sglang.srt.managers.scheduler import Scheduler

    if not hasattr(Scheduler.set_internal_state, "c2t"):
        Scheduler.set_internal_state = _setter(Scheduler.set_internal_state)
        Scheduler.get_internal_state = _getter(Scheduler.get_internal_state)


def _setter(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_internal_state(self: Any, recv_req: Any) -> Any:
        from sglang.srt.managers.io_struct import SetInternalStateReqOutput

        requested = dict(recv_req.server_args)
        ours = {key: requested.pop(key) for key in (BETA, MAX_DEPTH, AUTO_BETA) if key in requested}
        if not ours:
            return original(self, recv_req)
        if requested:
            logger.warning("C2T: %s cannot be changed in one request with %s", sorted(requested), sorted(ours))
            return SetInternalStateReqOutput(updated=False)
        try:
            apply(self.draft_worker.scorer, self.draft_worker.planner, ours)
            publish(self.draft_worker)
        except ConfigError as error:
            logger.warning("C2T: %s", error)
            return SetInternalStateReqOutput(updated=False)
        logger.info("C2T: %s", state(self.draft_worker))
        return SetInternalStateReqOutput(updated=True)

    set_internal_state.c2t = True  # type: ignore[attr-defined]
    return set_internal_state


def _getter(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_internal_state(self: Any, recv_req: Any) -> Any:
        output = original(self, recv_req)
        output.internal_state["c2t"] = report(self.draft_worker)
        return output

    return get_internal_state


def apply(scorer: ChainScorer, planner: StepPlanner | None, values: dict[str, float]) -> None:
    """Change all values or, with ConfigError, none."""
    depth, auto = values.get(MAX_DEPTH), values.get(AUTO_BETA)
    if depth is not None and int(depth) != depth:
        raise ConfigError(f"{MAX_DEPTH} must be a whole number, got {depth}")
    if auto is not None and (auto != 1 or BETA in values):
        raise ConfigError(f"{AUTO_BETA} must be 1, without {BETA}, which ends it; got {values}")
    if auto is not None and planner is None:
        raise ConfigError(f"{AUTO_BETA} needs a server that was started with --speculative-c2t-beta {AUTO}")
    previous = float(scorer.beta)
    if BETA in values:
        scorer.set_beta(values[BETA])
    try:
        if depth is not None:
            scorer.set_max_depth(int(depth))
    except ConfigError:
        scorer.set_beta(previous)
        raise
    if auto is not None:
        scorer.set_beta(0.0)
    if planner is not None and (auto is not None or BETA in values):
        planner.active = auto is not None


def publish(worker: Any) -> None:
    """Tell Prometheus the settings."""
    exporter, found = worker.counts.exporter, state(worker)
    if exporter is not None:
        exporter.set("beta", math.nan if found["beta"] == AUTO else found["beta"])
        exporter.set("max_depth", found["max_depth"])


def report(worker: Any) -> dict[str, Any]:
    """Settings, counts and the whole configuration of a running worker."""
    recorder = worker.recorder
    traces = None if recorder is None else {"recorded": recorder.recorded, "dropped": recorder.dropped}
    return {
        **state(worker),
        **worker.counts.state(),
        "traces": traces,
        "planner": None if worker.planner is None else worker.planner.state(),
        "configuration": worker.configuration,
    }


def state(worker: Any) -> dict[str, float | int | str]:
    """beta, longest chain, draft steps, and how many tokens were kept for want of finite statistics."""
    scorer, planner = worker.scorer, worker.planner
    return {
        "beta": AUTO if planner is not None and planner.active else float(scorer.beta),
        "max_depth": int(scorer.max_depth),
        "d_max": scorer.d_max,
        "non_finite": int(scorer.non_finite),
    }
