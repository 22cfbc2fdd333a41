"""One server of a fleet, from event to event: it reads prompts, one after the other, and decodes in between."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from benchmarks.simulation.fleet.arrivals import Request


@dataclass
class Served:
    """A request and what became of it. first, last: seconds at which its first and last token came."""

    request: Request
    first: float = inf
    last: float = inf
    cached: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.request.at

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None of one token."""
        after = self.request.output - 1
        return (self.last - self.first) / after if after else None


@dataclass
class Prefixes:
    """Which groups' prefixes a server has in its cache: the last used ones. room: tokens."""

    room: int
    held: OrderedDict[int, int] = field(default_factory=OrderedDict)
    tokens: int = 0

    def use(self, group: int, prefix: int) -> int:
        """Tokens of the prefix that need not be read; from now on it is held, if it has place."""
        found = self.held.pop(group, 0)
        self.tokens += prefix - found
        self.held[group] = prefix
        while self.tokens > self.room and self.held:
            self.tokens -= self.held.popitem(last=False)[1]
        return min(found, prefix)


class Replica:
    """Reading a prompt stops decoding, as in an engine that does not mix them. All that decode get on alike, so one
    number says how far: `done` tokens of each since the beginning. A request ends when that has grown by its length.

    rates: tokens per second of each request while so many decode. prefill_s: seconds of reading so many tokens.
    decodes: whether what was read is decoded here; else it is handed on. reads: whether prompts are read here.
    """

    def __init__(
        self,
        rates: Sequence[float],
        prefill_s: Callable[[int], float],
        room: int,
        *,
        decodes: bool = True,
        reads: bool = True,
    ) -> None:
        self.rates, self.prefill_s, self.prefixes = rates, prefill_s, Prefixes(room)
        self.decodes, self.reads = decodes, reads
        self.waiting: deque[Served] = deque()
        self.running: list[tuple[float, int, Served]] = []
        self.reading: Served | None = None
        self.done = 0.0
        self.now = 0.0
        self.busy_until = 0.0
        self._entered = 0

    @property
    def load(self) -> int:
        """Requests that it has and has not ended."""
        return len(self.waiting) + len(self.running) + (self.reading is not None)

    def take(self, served: Served, now: float) -> None:
        """One more request."""
        self._advance(now)
        self.waiting.append(served)
        self._begin()

    def next_event(self) -> float:
        """Seconds at which something ends here, if nothing else arrives."""
        if self.reading is not None:
            return self.busy_until
        if not self.running:
            return inf
        return self.now + max(0.0, self.running[0][0] - self.done) / self.rates[len(self.running)]

    def step(self, now: float) -> list[Served]:
        """What ends now: requests that are complete, or, where nothing is decoded, that were read."""
        self._advance(now)
        ended: list[Served] = []
        if self.reading is not None:
            ended += self._read()
        elif self.running:
            # the clock's rounding must not leave a request behind its own end
            self.done = max(self.done, self.running[0][0])
            while self.running and self.running[0][0] <= self.done:
                served = heapq.heappop(self.running)[2]
                served.last = now
                ended.append(served)
        self._begin()
        return ended

    def _advance(self, now: float) -> None:
        if self.reading is None and self.running:
            self.done += (now - self.now) * self.rates[len(self.running)]
        self.now = now

    def _begin(self) -> None:
        while self.reading is None and self.waiting and len(self.running) < len(self.rates) - 1:
            served = self.waiting.popleft()
            if not self.reads:
                self._decode(served)
                continue
            request = served.request
            served.cached = self.prefixes.use(request.group, request.prefix)
            self.reading = served
            self.busy_until = self.now + self.prefill_s(request.own + request.prefix - served.cached)

    def _read(self) -> list[Served]:
        served, self.reading = self.reading, None
        assert served is not None
        served.first = self.now
        if not self.decodes:
            return [served]
        if served.request.output == 1:
            served.last = self.now
            return [served]
        self._decode(served)
        return []

    def _decode(self, served: Served) -> None:
        """From its second token on; the number of its entry decides between those that end together."""
        self._entered += 1
        heapq.heappush(self.running, (self.done + served.request.output - 1, self._entered, served))
