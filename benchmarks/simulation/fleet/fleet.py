"""A fleet from its first request to its last, event by event."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from math import inf

import numpy as np

from benchmarks.simulation.fleet.arrivals import Request
from benchmarks.simulation.fleet.replicas import Replica, Served
from benchmarks.simulation.fleet.routers import ROUTERS, Router
from benchmarks.simulation.fleet.speeds import Reading, Speeds
from c2t_plugin.errors import C2TError

# of a run, in which a fleet fills, and of its end, where nobody comes after: neither counts
WARM_UP, END = 0.25, 0.1


@dataclass(frozen=True)
class Fleet:
    """replicas: in all. readers: those of them that only read prompts, and hand what they read to the others; 0: all do
    both. router: by its name, for prompts; what was read goes to the replica with fewest requests."""

    replicas: int
    router: str
    readers: int = 0


@dataclass(frozen=True)
class Limits:
    """What a request that counts as good keeps: seconds to its first token, and per token after."""

    ttft: float = 2.0
    tpot: float = 0.04

    def kept(self, served: Served) -> bool:
        return served.ttft <= self.ttft and (served.tpot or 0.0) <= self.tpot


class Run:
    """One arm's fleet over one stream of requests."""

    def __init__(self, fleet: Fleet, speeds: Speeds, reading: Reading, seed: int = 0) -> None:
        prefill = lru_cache(maxsize=None)(partial(reading.prefill_s, drafted=speeds.draft))
        room, rng = reading.cached_tokens(speeds.slots), np.random.default_rng(seed)
        apart = fleet.readers > 0
        self.replicas = [
            Replica(speeds.rates, prefill, room, decodes=not apart, reads=True)
            if not apart or place < fleet.readers
            else Replica(speeds.rates, prefill, 0, reads=False)
            for place in range(fleet.replicas)
        ]
        self.reading, self.readers = reading, fleet.readers
        self.router: Router = ROUTERS[fleet.router](fleet.readers or fleet.replicas, rng)
        self.decoding: Router | None = None
        if apart:
            self.decoding = ROUTERS["least load"](fleet.replicas - fleet.readers, rng)
        self._due = [inf] * fleet.replicas
        # (seconds, number of the entry, replica or -1 of a transfer, what is transferred)
        self._events: list[tuple[float, int, int, Served | None]] = []
        self._number = count()

    def serve(self, requests: Sequence[Request]) -> list[Served]:
        """All requests in their order of arrival, until the last one has ended."""
        everything = [Served(request) for request in requests]
        for served in everything:
            self._until(served.request.at)
            place = self.router.choose(served.request.group)
            self.router.change(place, 1)
            self._take(place, served, served.request.at)
        self._until(inf)
        return everything

    def _until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            at, _, place, served = heapq.heappop(self._events)
            if served is not None:
                self._hand_on(served, at)
            elif at == self._due[place]:
                self._end(place, at)

    def _end(self, place: int, now: float) -> None:
        replica = self.replicas[place]
        for served in replica.step(now):
            own = place - self.readers if self.decoding and place >= self.readers else place
            router = self.decoding if self.decoding and place >= self.readers else self.router
            router.change(own, -1)
            if self.decoding and place < self.readers:
                self._transfer(served, now)
        # its event is gone: what is due at the very same time needs one of its own
        self._due[place] = inf
        self._schedule(place)

    def _transfer(self, served: Served, now: float) -> None:
        if served.request.output == 1:
            served.last = now
            return
        arrives = now + self.reading.transfer_s(served.request.own + served.request.prefix)
        heapq.heappush(self._events, (arrives, next(self._number), -1, served))

    def _hand_on(self, served: Served, now: float) -> None:
        assert self.decoding is not None
        place = self.decoding.choose(served.request.group)
        self.decoding.change(place, 1)
        self._take(self.readers + place, served, now)

    def _take(self, place: int, served: Served, now: float) -> None:
        self.replicas[place].take(served, now)
        self._schedule(place)

    def _schedule(self, place: int) -> None:
        due, before = self.replicas[place].next_event(), self._due[place]
        self._due[place] = due
        if due < inf and due != before:
            heapq.heappush(self._events, (due, next(self._number), place, None))


def figures(served: Sequence[Served], seconds: float, replicas: int, limits: Limits) -> dict[str, float | None]:
    """What a row says, of the requests that arrived between the warm-up and the end of so many seconds; tokens per
    second and replica are of those that ended in that time. C2TError if there are none."""
    start, end = WARM_UP * seconds, (1 - END) * seconds
    counted = [each for each in served if start <= each.request.at < end]
    if not counted:
        raise C2TError(f"no request arrives between {start:g} and {end:g} s; raise the rate or the seconds")
    good = [each for each in counted if limits.kept(each)]
    span = (end - start) * replicas
    prompts = sum(each.request.prefix for each in counted)
    found: dict[str, float | None] = {
        "requests": float(len(counted)),
        "offered_tokens_per_s": _tokens(counted) / span,
        "tokens_per_s": _tokens([each for each in served if start <= each.last < end]) / span,
        "goodput_tokens_per_s": _tokens(good) / span,
        "good_share": len(good) / len(counted),
        "prefix_hits": sum(each.cached for each in counted) / prompts if prompts else None,
    }
    per_token = [each.tpot for each in counted if each.tpot is not None]
    for name, values in (("ttft", [each.ttft for each in counted]), ("tpot", per_token)):
        for share in (50, 99):
            found[f"{name}_p{share}_ms"] = 1e3 * float(np.percentile(values, share)) if values else None
    return found


def _tokens(served: Sequence[Served]) -> int:
    return sum(each.request.output for each in served)
