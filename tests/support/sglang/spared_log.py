"""A plugin for tests only: has a planner spare scores early, writes down what every step did, and plants faults.

SPARED_LOG names a file that gets one JSON line per step: its requests, and what LoggedPlan wants of it. A fault comes
after that. PLANTED_FAULT_FILE names a file that may hold the name of one, or CUT. Beside the first file is another,
`.learnt`, with a line per step of what the planner learns of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULTS = ("one_token_less", "seeds_of_a_step_before")
# the planner's own decision: nothing of a draft is verified
CUT = "nothing_of_each"
# Scored drafts before any goes without, and of how many one is scored after that.
FIRST, EVERY = 4, 3


def spare(patch: Callable[[Any, str, Any], None]) -> None:
    """Settle what pays: drafting does, scores do not. patch: setattr, or one that is undone."""
    from c2t_plugin.planner import planner, sparing

    depth_of = planner.Planner.depth

    def noted(self: Any, *_: Any) -> None:
        self.drafts, self.pays = self.drafts + 1, False

    patch(planner.Planner, "depth", lambda self, *asked: max(1, depth_of(self, *asked)))
    patch(sparing.Worth, "note", noted)
    for name, value in (("FIRST", FIRST), ("EVERY", EVERY), ("SCORED", 1)):
        patch(sparing, name, value)


def register() -> None:
    from c2t_plugin.engines import host_chains
    from c2t_plugin.engines.sglang import worker
    from c2t_plugin.planner import sparing

    spare(setattr)
    path, planted = Path(os.environ["SPARED_LOG"]), Path(os.environ["PLANTED_FAULT_FILE"])
    plan, keep, learn = worker.StepMixin.planned_depth, sparing.SparingPlanner.keep, sparing.SparingPlanner.learn
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
        if CUT in planted.read_text():
            found = found.clamp(max=0)
        known = {"confidence": sure[..., 0].tolist(), "kept": found.tolist()}
        write({"depth": self.depth, "scores": self.scores, **known})
        faulty = not self.scores and "one_token_less" in planted.read_text()
        return (found - 1).clamp(min=0) if faulty else found

    def noted_learn(self: Any, *outcomes: Any) -> None:
        with path.with_suffix(".learnt").open("a") as log:
            for sure, known, hits, owners in outcomes:
                if len(owners):
                    log.write(json.dumps([list(owners), sure.shape[1], known.tolist(), hits.tolist()]) + "\n")
        learn(self, *outcomes)

    def write(step: dict[str, Any]) -> None:
        with path.open("a") as log:
            log.write(json.dumps({"rids": rids, **step}) + "\n")

    def seeds(self: Any, slots: Any, logits: Any) -> None:
        stale = self._host_seeds[:, slots.numpy()].copy()
        write_seed(self, slots, logits)
        if self.planner is not None and self.planner.depth and "seeds_of_a_step_before" in planted.read_text():
            self._host_seeds[:, slots.numpy()] = stale

    worker.StepMixin.planned_depth, sparing.SparingPlanner.keep = noted_plan, noted_keep
    sparing.SparingPlanner.learn = noted_learn
    host_chains.HostChainScorer.write_seed = seeds
