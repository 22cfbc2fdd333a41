"""How long drafts of model runner V2 take, for the planner in the scheduler's process: on a GPU by its own clock."""

from __future__ import annotations

import time

import torch

# Moments of a draft: it begins, every chain has its first token, it is done.
BEGIN, FIRST, END = range(3)


class DraftTimes:
    """Of the newest draft. Nobody waits here."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if on_gpu else None
        self._moments = [0.0, 0.0, 0.0]
        self._has_first = False

    def mark(self, moment: int) -> None:
        """Called with BEGIN, with FIRST where more is drafted than that, and with END."""
        if moment == END and not self._has_first:
            self._note(FIRST)
        self._has_first = moment == FIRST
        self._note(moment)

    def _note(self, moment: int) -> None:
        if self._events is None:
            self._moments[moment] = time.perf_counter()
        else:
            self._events[moment].record()

    def seconds(self) -> tuple[float, float]:
        """Until the first token, and of the whole draft. Asked for when its results have been waited for."""
        if self._events is None:
            begun, given, over = self._moments
            return given - begun, over - begun
        start, first, done = self._events
        return start.elapsed_time(first) / 1000.0, start.elapsed_time(done) / 1000.0
