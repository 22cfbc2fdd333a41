"""Chains that the host scores: drafts end on their way, and steps go without scores where these do not pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from c2t_plugin.planner.ahead import DraftEnd
from c2t_plugin.planner.sparing import SparingPlanner


def planner(scorer: Any, scored_s: Callable[[], float], *how: Any, **keyword: Any) -> SparingPlanner:
    """One by which a HostChainScorer is spared steps. scored_s, how: see SparingPlanner."""
    made = scorer.planner = SparingPlanner(*how, scored_s=scored_s, **keyword)
    return made


def ending(worker: Any, end: Callable[[int], None]) -> Callable[[], bool]:
    """For `Parts.ends` of this worker: a draft ends when another token does not pay. end: ends it at a depth, since
    SGLang's loop asks for its depth before every pass."""
    parts, drafting = worker.c2t, worker._draft_worker
    scorer, planner = parts.scorer, parts.planner
    planner.draft_end = DraftEnd()

    def ends() -> bool:
        if scorer.scored >= drafting.speculative_num_steps:
            return False
        with parts.counts.classifying():
            goes_on: bool = planner.goes_on(scorer.scored, *scorer.newest())
        if not goes_on:
            planner.ended(scorer.scored)
            end(scorer.scored)
        return not goes_on

    return ends
