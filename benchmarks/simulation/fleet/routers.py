"""Which replica a request goes to: the rules that engines' routers have."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

# of SGLang's router 0.3.2, `cache_aware`: above both, balance goes before prefixes
MORE_THAN, TIMES = 64, 1.5


class Router(ABC):
    """Knows how many requests each replica has."""

    name: ClassVar[str]

    def __init__(self, replicas: int, rng: np.random.Generator) -> None:
        self.loads = [0] * replicas
        self.rng = rng
        # (load, replica), also outdated ones: what is on top counts if it still holds
        self._least = [(0, place) for place in range(replicas)]
        self._most = [(0, place) for place in range(replicas)]

    @abstractmethod
    def choose(self, group: int) -> int:
        """The replica of a request that begins like others of its group."""

    def change(self, place: int, by: int) -> None:
        """A replica has got or ended a request."""
        self.loads[place] += by
        heapq.heappush(self._least, (self.loads[place], place))
        heapq.heappush(self._most, (-self.loads[place], place))

    @property
    def least(self) -> int:
        """The replica with fewest requests, the first of several."""
        while self._least[0][0] != self.loads[self._least[0][1]]:
            heapq.heappop(self._least)
        return self._least[0][1]

    @property
    def most(self) -> int:
        """Requests of the replica that has most."""
        while -self._most[0][0] != self.loads[self._most[0][1]]:
            heapq.heappop(self._most)
        return -self._most[0][0]


class RoundRobin(Router):
    """One after the other."""

    name = "round robin"

    def __init__(self, replicas: int, rng: np.random.Generator) -> None:
        super().__init__(replicas, rng)
        self._next = -1

    def choose(self, group: int) -> int:
        self._next = (self._next + 1) % len(self.loads)
        return self._next


class LeastLoad(Router):
    """The one with fewest requests."""

    name = "least load"

    def choose(self, group: int) -> int:
        return self.least


class PowerOfTwo(Router):
    """The one with fewer requests of two that are drawn."""

    name = "power of two"

    def choose(self, group: int) -> int:
        one, other = self.rng.integers(len(self.loads), size=2).tolist()
        return int(min(one, other, key=lambda place: (self.loads[place], place)))


class CacheAware(Router):
    """Where the group was last, as long as replicas have about equally many requests; else the one with fewest."""

    name = "cache aware"

    def __init__(self, replicas: int, rng: np.random.Generator) -> None:
        super().__init__(replicas, rng)
        self._home: dict[int, int] = {}

    def choose(self, group: int) -> int:
        least = self.least
        fewest, most = self.loads[least], self.most
        uneven = most - fewest > MORE_THAN and most > TIMES * fewest
        place = self._home.get(group, least)
        if uneven:
            place = least
        self._home[group] = place
        return place


ROUTERS: Mapping[str, type[Router]] = {each.name: each for each in (RoundRobin, LeastLoad, PowerOfTwo, CacheAware)}
