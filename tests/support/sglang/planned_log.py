"""A plugin for tests only: writes down what every step of a lagged planner did, and plants faults into it.

STEP_LOG names a file that gets one JSON line per verify forward of the target: requests, depth of the draft, how long
the planner is told that contexts are, the confidences of their drafts (request, depth), rows, and how many of them each
request wants. PLANTED_FAULT_FILE names
one that may hold the name of a fault.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FAULTS = ("confidences_one_step_younger", "rows_of_the_last_step")


def register() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from c2t_plugin.engines.sglang import worker
    from c2t_plugin.engines.sglang.drafters import chain
    from c2t_plugin.engines.sglang.step import step_of
    from c2t_plugin.planner.step_planner import StepPlanner

    path, planted = Path(os.environ["STEP_LOG"]), Path(os.environ["PLANTED_FAULT_FILE"])
    plan, decide, forward = worker.StepMixin.planned_depth, chain.ChainDrafter.decide, ModelRunner.forward
    note, rows = StepPlanner.note, StepPlanner.plan_rows
    now: dict[str, Any] = {}
    before = [0]

    def planned(self: Any, reqs: Any) -> int:
        depth = plan(self, reqs)
        now.clear()
        now.update(rids=[req.rid for req in reqs], depth=depth, context=self.c2t.planner.context())
        return depth

    def decided(self: Any, batch: Any, drafted: Any) -> Any:
        found = decide(self, batch, drafted)
        now.update(confidence=self._scorer.confidence(len(batch.reqs)).tolist())
        return found

    def logged(self: Any, forward_batch: Any, *positional: Any, **keyword: Any) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            spec_info = forward_batch.spec_info
            lengths = (step_of(spec_info).kept + 1).tolist()
            line = {**now, "rows": len(forward_batch.input_ids), "lengths": lengths}
            with path.open("a") as log:
                log.write(json.dumps(line) + "\n")
        return forward(self, forward_batch, *positional, **keyword)

    def early(self: Any, confidence: Any) -> None:
        note(self, confidence)
        while "confidences_one_step_younger" in planted.read_text() and self._unread._written > self._unread._read:
            self._planner.observe(self._unread.read())

    def stale(self: Any, requests: int) -> Any:
        found, before[0] = before[0], rows(self, requests)
        return max(found, requests) if found and "rows_of_the_last_step" in planted.read_text() else before[0]

    worker.StepMixin.planned_depth, chain.ChainDrafter.decide, ModelRunner.forward = planned, decided, logged
    StepPlanner.note, StepPlanner.plan_rows = early, stale
