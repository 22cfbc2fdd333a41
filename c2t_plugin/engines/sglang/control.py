"""Run-time control over SGLang's own routes: read and change beta and the longest chain of a running server.

POST /set_internal_state {"server_args": {"speculative_c2t_beta": 0.4, "speculative_c2t_max_depth": 3}}
{"speculative_c2t_auto": 1} returns to the planner, where the server was started with --speculative-c2t-planner on.
GET /get_server_info lists them under "c2t", with what has been counted.
"""

from __future__ import annotations

import bisect
import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from c2t_plugin.config import AUTO
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner.step_planner import StepPlanner
from c2t_plugin.request_options import MOST, shown

if TYPE_CHECKING:
    from c2t_plugin.engines.sglang.parts import Scorer

logger = logging.getLogger(__name__)

BETA = "speculative_c2t_beta"
MAX_DEPTH = "speculative_c2t_max_depth"
AUTO_BETA = "speculative_c2t_auto"


def setter(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's handler, which ours are taken out of the request for."""

    @functools.wraps(original)
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
            apply(self.draft_worker.c2t.scorer, self.draft_worker.c2t.planner, ours)
            publish(self.draft_worker.c2t)
        except ConfigError as error:
            logger.warning("C2T: nothing was changed: %s", error)
            return SetInternalStateReqOutput(updated=False)
        logger.info("C2T: %s", state(self.draft_worker.c2t))
        return SetInternalStateReqOutput(updated=True)

    return set_internal_state


def getter(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's handler, with what ours have to say beside."""

    @functools.wraps(original)
    def get_internal_state(self: Any, recv_req: Any) -> Any:
        output = original(self, recv_req)
        output.internal_state["c2t"] = report(self.draft_worker.c2t)
        return output

    return get_internal_state


def apply(scorer: Scorer, planner: StepPlanner | None, values: dict[str, Any]) -> None:
    """Change all values or, with ConfigError, none. Raises nothing else, whatever the values are."""
    for name, value in values.items():
        if not (isinstance(value, int | float) and abs(value) <= MOST):
            raise ConfigError(f"{name} must be a number, got {shown(value)}")
    depth, auto = values.get(MAX_DEPTH), values.get(AUTO_BETA)
    if depth is not None and int(depth) != depth:
        raise ConfigError(f"{MAX_DEPTH} must be a whole number, got {depth}")
    if auto is not None and (auto != 1 or BETA in values):
        raise ConfigError(f"{AUTO_BETA} must be 1, without {BETA}, which ends it; got {values}")
    if auto is not None and planner is None:
        raise ConfigError(f"{AUTO_BETA} needs a server that was started with --speculative-c2t-planner on")
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
    if planner is not None and depth is not None:
        planner.allowed = bisect.bisect(planner.depths, depth)


def publish(parts: Parts) -> None:
    """Tell Prometheus the settings."""
    exporter, found = parts.counts.exporter, state(parts)
    if exporter is not None:
        exporter.set("beta", math.nan if found["beta"] == AUTO else float(found["beta"]))
        exporter.set("max_depth", int(found["max_depth"]))


def report(parts: Parts) -> dict[str, Any]:
    """Settings, counts and the whole configuration of a running server."""
    names, recorder = ("recorded", "dropped", "failed"), parts.recorder
    traces = None if recorder is None else {name: getattr(recorder, name) for name in names}
    return {
        **state(parts),
        **parts.counts.state(),
        "traces": traces,
        "planner": None if parts.planner is None else parts.planner.state(),
        "configuration": parts.configuration,
    }


def state(parts: Parts) -> dict[str, float | int | str]:
    """beta, longest chain, draft steps, and how many tokens were kept for want of finite statistics."""
    scorer, planner = parts.scorer, parts.planner
    return {
        "beta": AUTO if planner is not None and planner.active else float(scorer.beta),
        "max_depth": int(scorer.max_depth),
        "d_max": scorer.d_max,
        "non_finite": int(scorer.non_finite),
    }
