"""A plugin for tests only: writes down what the planner was asked and what it decided.

STEP_LOG names a file that gets one JSON line per step: its requests and how deep they draft; at a depth above 0 also
the confidences of their drafts (request, depth) and how many tokens of each are verified.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    from c2t_plugin.engines.sglang import worker
    from c2t_plugin.planner.step_planner import StepPlanner

    path = Path(os.environ["STEP_LOG"])
    plan, keep = worker.StepMixin.planned_depth, StepPlanner.keep
    now: dict[str, Any] = {}

    def noted_plan(self: Any, reqs: Any) -> int:
        depth = plan(self, reqs)
        now.clear()
        now.update(rids=[req.rid for req in reqs], depth=depth)
        if not depth:
            write()
        return depth

    def noted_keep(self: Any, kept: Any, own: Any, sure: Any) -> Any:
        found = keep(self, kept, own, sure)
        confidence = sure if sure.dim() == 2 else sure[..., 0]
        now.update(confidence=confidence.tolist(), kept=found.tolist())
        write()
        return found

    def write() -> None:
        with path.open("a") as log:
            log.write(json.dumps(now) + "\n")

    worker.StepMixin.planned_depth, StepPlanner.keep = noted_plan, noted_keep
