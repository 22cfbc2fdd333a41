"""States of linear layers for the made-up requests, where the target has such layers beside attention."""

from __future__ import annotations

from typing import Any


class LinearStates:
    """One for each of rows 1, 2, ... of SGLang's pool of requests until `close`; nothing without such layers.

    Raises MemoryError where there are not so many.
    """

    def __init__(self, pool: Any, requests: int) -> None:
        self._pool, self._rows = pool, slice(1, requests + 1)
        self._slots = None
        if not hasattr(pool, "mamba_allocator"):
            return
        self._slots = pool.mamba_allocator.alloc(requests)
        if self._slots is None:
            raise MemoryError(f"there are no {requests} states of linear layers")
        pool.req_index_to_mamba_index_mapping[self._rows] = self._slots.int()

    def clear(self) -> None:
        """Make them those of requests without a token. Before each pass: a convolution's state is moved on by the rows
        of a verification, and SGLang moves it back when tokens are accepted, which none are here."""
        if self._slots is not None:
            cache = self._pool.mamba_pool.mamba_cache
            for each in (*cache.conv, cache.temporal):
                each[:, self._slots.long()] = 0

    def close(self) -> None:
        """Give them back."""
        if self._slots is not None:
            self.clear()
            self._pool.req_index_to_mamba_index_mapping[self._rows] = 0
            self._pool.mamba_allocator.free(self._slots)
            self._slots = None


def room(pool: Any, requests: int) -> int:
    """How many of so many requests can have one."""
    return min(requests, pool.mamba_allocator.available_size()) if hasattr(pool, "mamba_allocator") else requests
