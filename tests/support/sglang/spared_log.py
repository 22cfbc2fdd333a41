"""A plugin for tests only: has a planner spare scores early, writes down what every step did, and plants faults.

SPARED_LOG names a file that gets one JSON line per step: its requests, depth, whether it has scores, the
confidences of its drafts and how many tokens of each are verified. PLANTED_FAULT_FILE names one that may hold the name
of a fault.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FAULTS = ("one_token_less", "seeds_of_a_step_before")
# Scored drafts before any goes without, and of how many one is scored after that.
FIRST, EVERY = 4, 3


def register() -> None:
    from c2t_plugin.engines import host_chains
    from c2t_plugin.engines.sglang import worker
    from c2t_plugin.planner import planner, sparing

    sparing.FIRST, sparing.EVERY, sparing.SCORED = FIRST, EVERY, 1
    # what pays is settled here: drafting does, scores do not
    depth_of = planner.Planner.depth
    planner.Planner.depth = lambda self, *asked: max(1, depth_of(self, *asked))

    def noted(self: Any, *_: Any) -> None:
        self.drafts, self.pays = self.drafts + 1, False

    sparing.Worth.note = noted
    path, planted = Path(os.environ["SPARED_LOG"]), Path(os.environ["PLANTED_FAULT_FILE"])
    plan, keep = worker.StepMixin.planned_depth, sparing.SparingPlanner.keep
    write_seed = host_chains.HostChainScorer.write_seed
    rids: list[str] = []

    def noted_plan(self: Any, reqs: Any) -> int:
        rids[:] = [req.rid for req in reqs]
        depth = plan(self, reqs)
        if not depth:
            write({"depth": 0, "scores": True, "confidence": [[] for _ in rids], "kept": [0] * len(rids)})
        return depth

    def noted_keep(self: Any, kept: Any, own: Any, sure: Any) -> Any:
        found = keep(self, kept, own, sure)
        if not self.scores and "one_token_less" in planted.read_text():
            found = (found - 1).clamp(min=0)
        known = {"confidence": sure[..., 0].tolist(), "kept": found.tolist()}
        write({"depth": self.depth, "scores": self.scores, **known})
        return found

    def write(step: dict[str, Any]) -> None:
        with path.open("a") as log:
            log.write(json.dumps({"rids": rids, **step}) + "\n")

    def seeds(self: Any, slots: Any, logits: Any) -> None:
        stale = self._host_seeds[:, slots.numpy()].copy()
        write_seed(self, slots, logits)
        if self.planner is not None and self.planner.depth and "seeds_of_a_step_before" in planted.read_text():
            self._host_seeds[:, slots.numpy()] = stale

    worker.StepMixin.planned_depth, sparing.SparingPlanner.keep = noted_plan, noted_keep
    host_chains.HostChainScorer.write_seed = seeds
