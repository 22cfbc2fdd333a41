"""Rows of the target's pass by those that earlier steps wanted: `lagged` without a planner. See lagged.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from c2t_plugin.engines.sglang.verify.layout import rows_to_compute
from c2t_plugin.planner.readback import LAG, Readback

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
