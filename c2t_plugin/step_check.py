"""The kernel that vLLM's model runner V2 drafts with, against its reference: for `c2t doctor --gpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from c2t_kernels.step import StepState
from c2t_plugin.kernel_checks import SCORE_ALLOWED, Check, Shapes, drawn_stats


def step_check(shapes: Shapes) -> Check:
    """See kernel_checks.check."""
    depths, device = shapes.width - 1, shapes.device
    drawn = drawn_stats(shapes, depths)
    # a token without statistics, and a row that pads
    drawn[0, 1, 0] = torch.nan
    slots = torch.arange(shapes.requests, device=device).flip(0) - 1
    beta = torch.full((1,), 0.4, device=device)
    longest = torch.full((1,), depths - 1, dtype=torch.int32, device=device)

    def run(side: Callable[[str, str], Any]) -> Sequence[Tensor]:
        state = StepState.create(shapes.requests, depths, device)
        chances, kept = (torch.zeros(shapes.requests, depths, *more, device=device) for more in ((), (4,)))
        for number, stats in enumerate(drawn):
            at = torch.tensor(number, device=device)
            side("step", "score_step")(state, shapes.network, *stats, at, slots, beta, longest, chances, kept)
        return *state, chances, kept

    return "score_step", SCORE_ALLOWED, run
