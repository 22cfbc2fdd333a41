"""The kernel that vLLM's model runner V2 drafts with, against its reference: for `c2t doctor --gpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from c2t_kernels.step import Meaning, StepState
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

    # what is learnt of chances
    slope, offsets = torch.full((1,), 0.7, device=device), torch.linspace(-1.0, 1.0, depths, device=device)

    def run(side: Callable[[str, str], Any]) -> Sequence[Tensor]:
        found: list[Tensor] = []
        for learns in (False, True):
            state = StepState.create(shapes.requests, depths, device)
            chances, kept = (torch.zeros(shapes.requests, depths, *more, device=device) for more in ((), (4,)))
            noted = torch.zeros(2, shapes.requests, depths, device=device)
            own = (None, Meaning(slope, offsets, *noted)) if learns else (kept, None)
            for number, stats in enumerate(drawn):
                at = torch.tensor(number, device=device)
                side("step", "score_step")(state, shapes.network, *stats, at, slots, beta, longest, chances, *own)
            # not the logits, which magnify what chances near 0 and 1 differ by
            found += [*state, chances, kept, noted[1]]
        return found

    return "score_step", SCORE_ALLOWED, run
