"""A plugin for tests only: writes down what the target computes, and plants faults into compact verification.

ROW_LOG names a file that gets one JSON line per verify forward of the target: requests, rows, and the lengths of the
layout (None where the whole window is verified). PLANTED_FAULT_FILE names one that holds the name of a fault or
nothing; it is read at every step, so that one server serves all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def register() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from c2t_plugin.engines.sglang.ragged import RaggedVerify

    ModelRunner.forward = _logged(ModelRunner.forward, Path(os.environ["ROW_LOG"]))
    if "PLANTED_FAULT_FILE" in os.environ:
        RaggedVerify.pack = _faulty(RaggedVerify.pack, PACKING)
        RaggedVerify.scatter = _faulty(RaggedVerify.scatter, SCATTERING)


def _logged(forward: Callable[..., Any], path: Path) -> Callable[..., Any]:
    def logged(self: Any, forward_batch: Any, *positional: Any, **keyword: Any) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            layout = forward_batch.spec_info.ragged_verify_layout
            line = {
                "requests": forward_batch.batch_size,
                "rows": len(forward_batch.input_ids),
                "lengths": None if layout is None else layout.verify_lens.tolist(),
            }
            with path.open("a") as log:
                log.write(json.dumps(line) + "\n")
        return forward(self, forward_batch, *positional, **keyword)

    return logged


def _faulty(right: Callable[..., Any], faults: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    def chosen(*arguments: Any) -> Any:
        fault = faults.get(Path(os.environ["PLANTED_FAULT_FILE"]).read_text().strip())
        return right(*arguments) if fault is None else fault(right, *arguments)

    return chosen


def a_row_scattered_to_the_wrong_place(scatter: Any, self: Any, output: Any, cu_seqlens: Any) -> None:
    if len(output.next_token_logits) > 1:
        output.next_token_logits[:2] = output.next_token_logits[:2].flip(0)
    scatter(self, output, cu_seqlens)


def positions_off_by_one(pack: Any, self: Any, batch: Any, kept: Any, uniform: Any) -> Any:
    packed, cu_seqlens = pack(self, batch, kept, uniform)
    packed.positions += 1
    return packed, cu_seqlens


def out_cache_loc_not_restored(pack: Any, self: Any, batch: Any, kept: Any, uniform: Any) -> Any:
    """The draft's extend pass, which takes its slots from the batch, gets the packed ones, then nobody's."""
    packed, cu_seqlens = pack(self, batch, kept, uniform)
    window = len(batch.out_cache_loc)
    batch.out_cache_loc = torch.cat([packed.out_cache_loc, torch.zeros(window, dtype=torch.int64)])[:window]
    return packed, cu_seqlens


def the_root_dropped(pack: Any, self: Any, batch: Any, kept: Any, uniform: Any) -> Any:
    """Each request's rows begin with its first draft token."""
    window, slots = batch.spec_info, batch.out_cache_loc
    right = window.draft_token, window.positions

    def later(part: Any) -> Any:
        return part.view(-1, self.width).roll(-1, dims=1).flatten()

    window.draft_token, window.positions, batch.out_cache_loc = later(right[0]), later(right[1]), later(slots)
    try:
        return pack(self, batch, kept, uniform)
    finally:
        (window.draft_token, window.positions), batch.out_cache_loc = right, slots


PACKING = {fault.__name__: fault for fault in (positions_off_by_one, out_cache_loc_not_restored, the_root_dropped)}
SCATTERING = {fault.__name__: fault for fault in (a_row_scattered_to_the_wrong_place,)}
FAULTS = (*PACKING, *SCATTERING)
