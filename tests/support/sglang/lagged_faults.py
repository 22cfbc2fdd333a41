"""A plugin for tests only: writes down what the lagged plan did, and plants faults into it.

STEP_LOG names a file that gets one JSON line per verify forward of the target: its requests, the confidences of their
drafts (request, depth), the server's longest chain, rows, how many of them each request wants and is given, and how
many links its chain has. PLANTED_FAULT_FILE names one that is read at every step; it may hold the name of a fault, and
`quiet`: then the longest chain is of 1 token until FULL requests have run together QUIET_STEPS times, and d_max after
that.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FAULTS = ("clip_of_the_wrong_request", "links_not_cut_to_the_clipped_length")
FULL = 8
QUIET_STEPS = 5


def register() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from c2t_plugin.engines.sglang.drafters import chain

    planted = Path(os.environ["PLANTED_FAULT_FILE"])
    _log(ModelRunner, chain.ChainDrafter, Path(os.environ["STEP_LOG"]), planted)
    _plant(chain, planted)


def _log(model_runner: Any, drafter: Any, path: Path, planted: Path) -> None:
    from c2t_plugin.engines.sglang.step import step_of

    decide, forward = drafter.decide, model_runner.forward

    def is_quiet() -> bool:
        if "quiet" not in planted.read_text():
            return False
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        return sum(len(step["rids"]) == FULL for step in steps) < QUIET_STEPS

    def decided_and_noted(self: Any, batch: Any, drafted: Any) -> Any:
        self._scorer.set_max_depth(1 if is_quiet() else self._scorer.d_max)
        verify_input = decide(self, batch, drafted)
        verify_input.noted = {
            "rids": [req.rid for req in batch.reqs],
            "max_depth": int(self._scorer.max_depth),
            "confidence": self._scorer.confidence(len(batch.reqs)).tolist(),
        }
        return verify_input

    def logged(self: Any, forward_batch: Any, *positional: Any, **keyword: Any) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            spec_info = forward_batch.spec_info
            # whole chains have no lengths of their own: SGLang's own pass computes them
            layout, whole = spec_info.ragged_verify_layout, [spec_info.draft_token_num] * len(spec_info.noted["rids"])
            line = {
                **spec_info.noted,
                "rows": len(forward_batch.input_ids),
                "lengths": (step_of(spec_info).kept + 1).tolist(),
                "given": whole if layout is None else layout.verify_lens.tolist(),
                "links": (spec_info.retrieve_next_token != -1).int().cumprod(1).sum(1).tolist(),
            }
            with path.open("a") as log:
                log.write(json.dumps(line) + "\n")
        return forward(self, forward_batch, *positional, **keyword)

    drafter.decide, model_runner.forward = decided_and_noted, logged


def _plant(chain: Any, path: Path) -> None:
    clipped = chain.ChainDrafter._clipped

    def faulty(self: Any, *arguments: Any) -> Any:
        links, planted = arguments[-1], path.read_text()
        whole = links.clone()
        wanted, kept, rows = clipped(self, *arguments)
        if "clip_of_the_wrong_request" in planted:
            kept = kept.roll(1)
        if any(fault in planted for fault in FAULTS):
            links.copy_(whole)
            chain.cut_links(links, wanted if "links_not_cut_to_the_clipped_length" in planted else kept)
        return wanted, kept, rows

    chain.ChainDrafter._clipped = faulty
