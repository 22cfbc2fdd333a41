"""A plugin for tests only: writes down what the target computes, and plants faults into how its rows are chosen.

ROW_LOG names a file that gets one JSON line per verify forward of the target: requests, width of the window, rows, the
lengths of the layout (None where the whole window is verified), and kept draft tokens of each request.
PLANTED_FAULT_FILE names one that holds the name of a fault or nothing; it is read at every step, so that one server
serves all of them. PLANTED_KERNEL names a kernel that the self-check finds wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from c2t_plugin.engines.sglang.step import attach, step_of


def register() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from c2t_plugin.engines.sglang.verify.packing import PackedVerify
    from c2t_plugin.engines.sglang.verify.windows import Windows

    ModelRunner.forward = _logged(ModelRunner.forward, Path(os.environ["ROW_LOG"]))
    if "PLANTED_FAULT_FILE" in os.environ:
        PackedVerify.pack = _faulty(PackedVerify.pack, PACKING)
        PackedVerify.scatter = _faulty(PackedVerify.scatter, SCATTERING)
        Windows.narrow = _faulty(Windows.narrow, NARROWING)
    if "PLANTED_KERNEL" in os.environ:
        from c2t_plugin import kernel_checks

        kernel_checks.check = _wrong(kernel_checks.check, os.environ["PLANTED_KERNEL"])


def _wrong(check: Callable[..., Any], kernel: str) -> Callable[..., Any]:
    return lambda *given, **named: (
        each._replace(error=0.5) if each.name == kernel else each for each in check(*given, **named)
    )


def _logged(forward: Callable[..., Any], path: Path) -> Callable[..., Any]:
    def logged(self: Any, forward_batch: Any, *positional: Any, **keyword: Any) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            layout = forward_batch.spec_info.ragged_verify_layout
            line = {
                "requests": forward_batch.batch_size,
                "width": forward_batch.spec_info.draft_token_num,
                "rows": len(forward_batch.input_ids),
                "lengths": None if layout is None else layout.verify_lens.tolist(),
                "kept": step_of(forward_batch.spec_info).kept.tolist(),
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


def a_row_scattered_to_the_wrong_place(scatter: Any, self: Any, output: Any, cu_seqlens: Any, width: int) -> None:
    if len(output.next_token_logits) > 1:
        output.next_token_logits[:2] = output.next_token_logits[:2].flip(0)
    scatter(self, output, cu_seqlens, width)


def positions_off_by_one(pack: Any, self: Any, batch: Any, step: Any, uniform: Any) -> Any:
    packed, cu_seqlens = pack(self, batch, step, uniform)
    packed.positions += 1
    return packed, cu_seqlens


def out_cache_loc_not_restored(pack: Any, self: Any, batch: Any, step: Any, uniform: Any) -> Any:
    """The draft's extend pass, which takes its slots from the batch, gets the packed ones, then nobody's."""
    packed, cu_seqlens = pack(self, batch, step, uniform)
    window = len(batch.out_cache_loc)
    batch.out_cache_loc = torch.cat([packed.out_cache_loc, torch.zeros(window, dtype=torch.int64)])[:window]
    return packed, cu_seqlens


def the_root_dropped(pack: Any, self: Any, batch: Any, step: Any, uniform: Any) -> Any:
    """Each request's rows begin with its first draft token."""
    window, slots = batch.spec_info, batch.out_cache_loc
    right = window.draft_token, window.positions

    def later(part: Any) -> Any:
        return part.view(-1, window.draft_token_num).roll(-1, dims=1).flatten()

    window.draft_token, window.positions, batch.out_cache_loc = later(right[0]), later(right[1]), later(slots)
    try:
        return pack(self, batch, step, uniform)
    finally:
        (window.draft_token, window.positions), batch.out_cache_loc = right, slots


def a_bit_of_the_mask_off(pack: Any, self: Any, batch: Any, step: Any, uniform: Any) -> Any:
    """No request's first draft token sees the root."""
    packed, cu_seqlens = pack(self, batch, step, uniform)
    starts = [0]
    for length in (step.kept + 1).tolist():
        if length > 1:
            packed.spec_info.custom_mask[starts[-1] + length] = False
        starts.append(starts[-1] + length**2)
    return packed, cu_seqlens


def the_mask_of_the_request_before(pack: Any, self: Any, batch: Any, step: Any, uniform: Any) -> Any:
    """Masks follow each other as if all were as large as the first."""
    packed, cu_seqlens = pack(self, batch, step, uniform)
    mask, lengths = packed.spec_info.custom_mask, (step.kept + 1).tolist()
    right = mask.clone()
    start = 0
    for length in lengths:
        wrong = right[: length**2]
        mask[start : start + length**2] = wrong
        start += length**2
    return packed, cu_seqlens


def the_prefix_of_the_request_before(pack: Any, self: Any, batch: Any, step: Any, uniform: Any) -> Any:
    packed, cu_seqlens = pack(self, batch, step, uniform)
    packed.req_pool_indices = packed.req_pool_indices.roll(1)
    return packed, cu_seqlens


def a_prefix_one_too_short(pack: Any, self: Any, batch: Any, step: Any, uniform: Any) -> Any:
    packed, cu_seqlens = pack(self, batch, step, uniform)
    packed.seq_lens = packed.seq_lens - 1
    return packed, cu_seqlens


def rows_of_two_requests_swapped(scatter: Any, self: Any, output: Any, cu_seqlens: Any, width: int) -> None:
    """The roots of the first and the last request."""
    rows = cu_seqlens[[0, -2]].long()
    output.next_token_logits[rows] = output.next_token_logits[rows.flip(0)]
    scatter(self, output, cu_seqlens, width)


def a_bucket_one_too_small(narrow: Any, self: Any, batch: Any, whole: Any) -> Any:
    """The deepest tokens of the longest requests do not fit."""
    step = step_of(whole)
    most = self.fitting(int(step.kept.max()) + 1)
    narrower = [width for width in self.widths if width < most]
    attach(whole, replace(step, kept=step.kept.clamp(max=max(narrower, default=most) - 1)))
    return narrow(self, batch, whole)


def the_root_drafted_again(narrow: Any, self: Any, batch: Any, whole: Any) -> Any:
    """The tokens of each window begin one place too early."""
    whole.draft_token = whole.draft_token.view(-1, whole.draft_token_num).roll(1, dims=1).flatten()
    return narrow(self, batch, whole)


_OF_CHAINS = (positions_off_by_one, out_cache_loc_not_restored, the_root_dropped)
_OF_TREES = (
    a_bit_of_the_mask_off,
    the_mask_of_the_request_before,
    the_prefix_of_the_request_before,
    a_prefix_one_too_short,
)
PACKING = {fault.__name__: fault for fault in (*_OF_CHAINS, *_OF_TREES)}
SCATTERING = {fault.__name__: fault for fault in (a_row_scattered_to_the_wrong_place, rows_of_two_requests_swapped)}
NARROWING = {fault.__name__: fault for fault in (a_bucket_one_too_small, the_root_drafted_again)}
FAULTS = (*(fault.__name__ for fault in _OF_CHAINS), a_row_scattered_to_the_wrong_place.__name__)
TREE_FAULTS = (*FAULTS, *(fault.__name__ for fault in _OF_TREES), rows_of_two_requests_swapped.__name__)
