"""`--speculative-c2t-rows lagged`, on a GPU the default: rows by the steps before, so that no step waits for a number.

The host chooses the target's graph, and only the device knows how many tokens a draft keeps. This predicts it from the
numbers of earlier steps, which are on the host by then; what does not fit the graph is clipped on the device.

Neither says anything about a token's own random draw: a prediction comes of statistics of earlier drafts, and what is
clipped are the tokens of lowest confidence. So output stays the target's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from c2t_plugin.config import AUTO, LAGGED, C2TConfig
from c2t_plugin.engines.sglang.verify.layout import rows_to_compute
from c2t_plugin.engines.sglang.verify.packing import PackedVerify
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner.readback import LAG, Readback
from c2t_plugin.planner.step_planner import StepPlanner
from c2t_plugin.scorer import ChainScorer

logger = logging.getLogger(__name__)

# Steps that a prediction looks back on.
MEMORY = 8


class _Step(NamedTuple):
    """One whose number is still to be read. batch: which one it belonged to."""

    requests: int
    batch: int


class LaggedRows:
    """Rows of one step's pass after another.

    They hold the roots and, per request, as many draft tokens as the largest of the last MEMORY known steps wanted. In
    the first LAG steps of a batch nothing is known, and they hold the uniform window. A batch is a new one where this
    step and the one before share fewer than half of the requests that the larger of them has.

    The same steps have the same rows on every rank: numbers were agreed on before they are noted, and are read at a
    fixed distance, not when they happen to be there.
    """

    def __init__(self, sizes: Callable[[], Sequence[int]], device: torch.device | str, requests: int) -> None:
        """sizes: token counts of the target's captured passes, rising. device: of the numbers. requests: of the largest
        batch."""
        self._sizes = sizes
        self._numbers = Readback(device, requests, torch.int32)
        self._unread: deque[_Step] = deque()
        # draft tokens wanted, requests
        self._known: deque[tuple[int, int]] = deque(maxlen=MEMORY)
        self._requests: set[str] = set()
        self._batch = 0

    def rows(self, rids: Sequence[str], width: int) -> int:
        """Of the step at hand; to be asked once, before `note`. rids: its requests. width: one's rows in the window."""
        self._follow(set(rids))
        if len(self._unread) == LAG:
            self._read()
        requests = len(rids)
        window = requests * width
        shares = [-(-wanted * requests // of) for wanted, of in self._known]
        needed = min(requests + max(shares), window) if shares else window
        return rows_to_compute(needed, self._sizes())

    def note(self, wanted: Tensor, sure: Tensor) -> tuple[Tensor, Tensor]:
        """wanted: (requests,) int32, draft tokens that the step would verify unclipped; the same on all ranks. sure:
        see ChainScorer.sure. Returns both, of what was copied to the host the copy; see Readback.write."""
        self._unread.append(_Step(len(wanted), self._batch))
        return self._numbers.write(wanted), sure

    def _follow(self, requests: set[str]) -> None:
        if 2 * len(requests & self._requests) < max(len(requests), len(self._requests)):
            self._batch += 1
            self._known.clear()
        self._requests = requests

    def _read(self) -> None:
        # added on the host: one launch less
        step, wanted = self._unread.popleft(), int(self._numbers.read().sum())
        if step.batch == self._batch:
            self._known.append((wanted, step.requests))


class PlannedRows:
    """The same of a planner's steps: it has decided on rows before the draft began, by confidences of steps before."""

    def __init__(self, planner: StepPlanner) -> None:
        self._planner = planner

    def rows(self, rids: Sequence[str], width: int) -> int:
        """See LaggedRows."""
        window = len(rids) * width
        # roots have to be computed whatever was planned
        needed = min(max(self._planner.rows or window, len(rids)), window)
        return rows_to_compute(needed, self._planner.sizes())

    def note(self, wanted: Tensor, sure: Tensor) -> tuple[Tensor, Tensor]:
        """See LaggedRows. The first rank's choices are everybody's."""
        return wanted, self._planner.note(sure)


def start(
    config: C2TConfig,
    packing: PackedVerify | None,
    scorer: ChainScorer,
    requests: int,
    planner: StepPlanner | None = None,
) -> LaggedRows | PlannedRows | None:
    """The plan, if it is the lagged one. packing: None where the uniform window is verified. requests: of the largest
    batch. Raises ConfigError where that is asked for and cannot be clipped."""
    device = scorer.beta.device
    wanted = config.rows == LAGGED or (config.rows == AUTO and config.mode == "chain" and device.type != "cpu")
    if not wanted:
        return None
    if packing is None:
        if config.rows == LAGGED:
            logger.warning("C2T: rows lagged chooses nothing over the uniform window")
        return None
    scorer.drafted(scorer.d_max)
    try:
        scorer.lengths(requests, budget=0)
    except ValueError as error:
        if config.rows == LAGGED:
            raise ConfigError(f"rows {LAGGED} cannot clip {requests} requests ({error}): use sync") from error
        logger.info("C2T: each step waits for its number of rows, since %d requests cannot be clipped", requests)
        return None
    if planner is None:
        return LaggedRows(packing.sizes, device, requests)
    planner.wait_for_nothing(requests, device)
    return PlannedRows(planner)
