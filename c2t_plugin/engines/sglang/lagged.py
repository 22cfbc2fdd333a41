"""`--speculative-c2t-plan lagged`: rows of the target's pass by the steps before, so that no step waits for its number.

The host chooses the target's graph, and only the device knows how many tokens a draft keeps. This predicts it from the
numbers of earlier steps, which are on the host by then; what does not fit the graph is clipped on the device.

Neither says anything about a token's own random draw: a prediction comes of statistics of earlier drafts, and what is
clipped are the tokens of lowest confidence. So output stays the target's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from c2t_plugin.config import LAGGED, C2TConfig
from c2t_plugin.engines.sglang.layout import rows_to_compute
from c2t_plugin.engines.sglang.ragged import RaggedVerify
from c2t_plugin.errors import ConfigError
from c2t_plugin.scorer import ChainScorer

logger = logging.getLogger(__name__)

# A step's number is read so many steps later. SGLang prepares a step while the one before may still run, but has the
# results of the one before that.
LAG = 2
# Steps that a prediction looks back on.
MEMORY = 8


class _Step(NamedTuple):
    """One whose number is still to be read. batch: which one it belonged to."""

    requests: int
    batch: int


class LaggedPlan:
    """Rows of one step's pass after another.

    They hold the roots and so many draft tokens per request as the hungriest of the last MEMORY known steps wanted. In
    the first LAG steps of a batch nothing is known, and they hold the uniform window. A batch is a new one where this
    step and the one before share fewer than half of the requests that the larger of them has.

    The same steps have the same rows on every rank: numbers were agreed on before they are noted, and are read at a
    fixed distance, not when they happen to be there.
    """

    def __init__(self, sizes: Callable[[], Sequence[int]], device: torch.device | str) -> None:
        """sizes: token counts of the target's captured passes, rising. device: of the numbers."""
        self._sizes = sizes
        self._numbers = _Readback(torch.device(device))
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
        return rows_to_compute(needed, window, self._sizes())

    def note(self, wanted: Tensor) -> None:
        """wanted: (requests,) int32, draft tokens that the step would verify unclipped; the same on all ranks."""
        self._numbers.write(wanted.sum())
        self._unread.append(_Step(len(wanted), self._batch))

    def _follow(self, requests: set[str]) -> None:
        if 2 * len(requests & self._requests) < max(len(requests), len(self._requests)):
            self._batch += 1
            self._known.clear()
        self._requests = requests

    def _read(self) -> None:
        step, wanted = self._unread.popleft(), self._numbers.read()
        if step.batch == self._batch:
            self._known.append((wanted, step.requests))


class _Readback:
    """Numbers of the device, on the host in the order in which they were written, of which LAG may be unread."""

    def __init__(self, device: torch.device) -> None:
        waits = device.type != "cpu"
        self._host = torch.zeros(LAG, dtype=torch.int64, pin_memory=waits)
        self._copied: list[Any] = [torch.get_device_module(device).Event() for _ in range(LAG)] if waits else []
        self._written = self._read = 0

    def write(self, number: Tensor) -> None:
        """number: one int64 on the device. Starts its copy."""
        place = self._written % LAG
        self._host[place].copy_(number, non_blocking=True)
        if self._copied:
            self._copied[place].record()
        self._written += 1

    def read(self) -> int:
        """The oldest unread one."""
        place = self._read % LAG
        if self._copied:
            # Not `query`: ranks would see different answers. LAG steps later there is nothing left to wait for.
            self._copied[place].synchronize()
        self._read += 1
        return int(self._host[place])


def start(config: C2TConfig, ragged: RaggedVerify | None, scorer: ChainScorer, requests: int) -> LaggedPlan | None:
    """The plan, if it is the lagged one. ragged: None where the uniform window is verified. requests: of the largest
    batch. Raises ConfigError where that cannot be clipped."""
    if config.plan != LAGGED:
        return None
    if ragged is None:
        logger.warning("C2T: plan lagged chooses nothing over the uniform window")
        return None
    scorer.drafted(scorer.d_max)
    try:
        scorer.lengths(requests, budget=0)
    except ValueError as error:
        raise ConfigError(f"plan {LAGGED} cannot clip {requests} requests ({error}): use sync") from error
    return LaggedPlan(ragged.sizes, scorer.beta.device)
