"""What one server process serves with, in one place: made by startup.py, completed with the attention backends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from c2t_plugin.engines.sglang.metrics import Counts
from c2t_plugin.planner.step_planner import StepPlanner

if TYPE_CHECKING:
    from c2t_plugin.engines.sglang.behind import Behind
    from c2t_plugin.engines.sglang.dp_attention import Together
    from c2t_plugin.engines.sglang.verify.lagged import PlannedRows
    from c2t_plugin.engines.sglang.verify.packing import PackedVerify
    from c2t_plugin.engines.sglang.verify.predicted import LaggedRows
    from c2t_plugin.engines.sglang.verify.windows import Windows
    from c2t_plugin.planner.following import Untold
    from c2t_plugin.scorer import ChainScorer
    from c2t_plugin.traces.recorder import TraceRecorder
    from c2t_plugin.trees.grower import TreeGrower

    # Of chains and of trees: seeds, limits and confidences of either.
    Scorer = ChainScorer | TreeGrower


@dataclass
class Parts:
    """configuration: every option as it was resolved.

    Known once the target has attention backends: packing, None where the uniform window is verified; lagged, its rows
    by earlier steps; windows, uniform ones of several widths; ends, asked after each token of a draft, whether it has
    ended; behind, None where the draft reads every plain step at once; together, what ranks with requests of their own
    agree on; untaught, SGLang's requests with their drafts, while it handles a result.
    """

    scorer: Scorer
    counts: Counts
    recorder: TraceRecorder | None
    planner: StepPlanner | None
    configuration: dict[str, Any]
    packing: PackedVerify | None = None
    lagged: LaggedRows | PlannedRows | None = None
    windows: Windows | None = None
    ends: Callable[[], bool] = lambda: False
    behind: Behind | None = None
    together: Together | None = None
    untaught: Sequence[tuple[Any, Untold]] = ()

    def timed(self, part: str, count: Callable[[], int]) -> contextlib.AbstractContextManager[None]:
        """Measures what happens within for the planner, in the few steps in which it wants that."""
        return contextlib.nullcontext() if self.planner is None else self.planner.timed(part, count)
