"""Asks a server, while something else goes on, how many requests it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from c2t_plugin.errors import C2TError


class Watch:
    """A thread that asks every `interval_s` seconds, never for 0, until the block is left.

    A client cannot tell from the answers: one that is slow to read finds whole answers at once, and of a server that
    took a request back, a request that waits looks like one that runs.

    An answer that failed ends the thread, and leaving the block raises it as C2TError, unless the block raises an error
    of its own.
    """

    def __init__(self, ask: Callable[[], int], interval_s: float) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._over = threading.Event()
        self._told: list[int] = []
        self._error: C2TError | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def most(self) -> int:
        """The largest number so far, 0 without any."""
        return max(self._told, default=0)

    @property
    def mean(self) -> float:
        """Of the numbers above 0; 0 without any."""
        busy = [each for each in self._told if each]
        return sum(busy) / len(busy) if busy else 0.0

    def __enter__(self) -> Self:
        if self._interval_s:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._over.set()
        if self._interval_s:
            self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                self._told.append(self._ask())
            except C2TError as error:
                self._error = error
                return
            self._over.wait(self._interval_s)
