"""A plugin for tests only: writes down what the lagged plan did, and plants faults into it.

STEP_LOG names a file that gets one JSON line per verify forward of the target: its requests, the confidences of their
drafts (request, depth), rows, lengths of the layout, and how many links each request's chain has. PLANTED_FAULT_FILE
names one that holds the name of a fault or nothing; it is read at every step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from c2t_plugin.engines.sglang import worker

    _log(ModelRunner, worker._DraftMixin, Path(os.environ["STEP_LOG"]))
    _plant(worker, Path(os.environ["PLANTED_FAULT_FILE"]))


def _log(model_runner: Any, draft_mixin: Any, path: Path) -> None:
    cut, forward = draft_mixin._cut, model_runner.forward

    def cut_and_noted(self: Any, batch: Any, verify_input: Any) -> None:
        cut(self, batch, verify_input)
        verify_input.noted = {
            "rids": [req.rid for req in batch.reqs],
            "confidence": self.scorer.confidence(len(batch.reqs)).tolist(),
        }

    def logged(self: Any, forward_batch: Any, *positional: Any, **keyword: Any) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            spec_info = forward_batch.spec_info
            line = {
                **spec_info.noted,
                "rows": len(forward_batch.input_ids),
                "lengths": spec_info.ragged_verify_layout.verify_lens.tolist(),
                "links": (spec_info.retrieve_next_token != -1).int().cumprod(1).sum(1).tolist(),
            }
            with path.open("a") as log:
                log.write(json.dumps(line) + "\n")
        return forward(self, forward_batch, *positional, **keyword)

    draft_mixin._cut, model_runner.forward = cut_and_noted, logged


def _plant(worker: Any, path: Path) -> None:
    clipped, cut_links, note = worker._DraftMixin._clipped, worker.cut_links, worker.LaggedPlan.note
    wanted_now: list[Any] = []

    def noting(self: Any, wanted: Any, rows: int) -> None:
        wanted_now[:] = [wanted]
        note(self, wanted, rows)

    def faulty_clip(self: Any, *arguments: Any) -> Any:
        kept, rows = clipped(self, *arguments)
        if path.read_text().strip() == "clip_of_the_wrong_request":
            kept = kept.roll(1)
        return kept, rows

    def faulty_links(links: Any, kept: Any) -> None:
        cut_links(links, wanted_now[0] if path.read_text().strip() == "links_not_cut_to_the_clipped_length" else kept)

    worker.LaggedPlan.note, worker._DraftMixin._clipped, worker.cut_links = noting, faulty_clip, faulty_links


FAULTS = ("clip_of_the_wrong_request", "links_not_cut_to_the_clipped_length")
