"""Arms that take turns: all servers are up, all but one stand still, and a pass of each follows a pass of another.

A machine's speed drifts by more than arms differ. Here whatever slows it meets all arms of a round alike, so that what
is compared are passes of one round. A server that stands still (SIGSTOP) takes memory but no processor; engines poll.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Protocol, Self

from benchmarks.serving.client import Client, Pass, Prompts
from benchmarks.serving.measuring import Condition, Outcome, one_line
from c2t_plugin.errors import C2TError

# a server that went on finds its sockets and clocks before it is measured
SETTLE_S = 0.3
WATCHED_EVERY_S = 0.25
# 97.5% points of Student's t by degrees of freedom, from 1; the last holds for more, where it is a little too wide
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class ArmError(C2TError):
    """A server failed in its turn. name: whose. The message is one line."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name


class Halting(Protocol):
    """A server that can be stopped where it stands; ServerProcess is one."""

    base_url: str

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

    def halt(self) -> None: ...

    def resume(self) -> None: ...

    def check_alive(self) -> None: ...


class Interleaved:
    """Started servers by name, in the order of their start, of which one at most runs.

    client: makes a client of a server's address. Leaving the block lets all servers go on, then ends them; a SIGINT
    meanwhile is a KeyboardInterrupt and leaves it the same way.
    """

    def __init__(self, client: Callable[[str], Client]) -> None:
        self._make_client = client
        self._stack = ExitStack()
        self._servers: dict[str, tuple[Halting, Client]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    @property
    def names(self) -> list[str]:
        return list(self._servers)

    def start(self, name: str, server: Halting) -> None:
        """Start a server and stop it again; it has the machine for itself meanwhile. C2TError if it does not start."""
        with ExitStack() as starting:
            starting.enter_context(server)
            starting.callback(server.resume)
            client = starting.enter_context(self._make_client(server.base_url))
            # each question takes processor from the few threads that are measured
            client.watched_every_s = WATCHED_EVERY_S
            server.halt()
            self._stack.push(starting.pop_all())
        self._servers[name] = server, client

    def start_all(self, names: Iterable[str], server: Callable[[str], Halting], needed: str) -> dict[str, str]:
        """Start these servers, one after the other. Returns why some have not started; C2TError if `needed` has not."""
        return self._started(names, lambda name: self.start(name, server(name)), needed)

    def start_together(self, names: Collection[str], server: Callable[[str], Halting], needed: str) -> dict[str, str]:
        """As `start_all`, all at the same time: where starting takes long, and there is room for it."""
        # these threads have to live as long as the servers: see ServerProcess
        pool = self._stack.enter_context(ThreadPoolExecutor(len(names)))

        def begin(name: str) -> None:
            self.start(name, server(name))

        starts = {name: pool.submit(begin, name) for name in names}
        return self._started(names, lambda name: starts[name].result(), needed)

    def _started(self, names: Iterable[str], start: Callable[[str], None], needed: str) -> dict[str, str]:
        failed = {}
        for name in names:
            try:
                start(name)
            except C2TError as error:
                if name == needed:
                    raise
                failed[name] = one_line(error)
        return failed

    @contextmanager
    def turn(self, name: str) -> Iterator[Client]:
        """The client of a server that runs while the block lasts. ArmError if it fails or has ended."""
        server, client = self._servers[name]
        try:
            server.check_alive()
            server.resume()
            time.sleep(SETTLE_S)
            yield client
        except C2TError as error:
            raise ArmError(name, _why(server, error)) from error
        finally:
            server.halt()

    def round(
        self, prompts: Prompts, condition: Condition, names: Sequence[str], advance: Callable[[], None]
    ) -> dict[str, Pass]:
        """A pass of each of these servers, in their order. advance: after each answer. ArmError if one fails."""
        concurrency, temperature = condition
        found = {}
        for name in names:
            with self.turn(name) as client:
                found[name] = client.run(prompts, concurrency, advance, temperature)
        return found


def turned(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: each begins one place later than the one before, and every other one runs backwards."""
    start = number // 2 % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if number % 2 else order


def paired_ratio(name: str, mine: Sequence[Pass], theirs: Sequence[Pass]) -> dict[str, float | None]:
    """The geometric mean of the ratios of speeds, pass by pass, as metrics.

    With several passes `{name}_low` and `{name}_high` are 95% bounds by Student's t of the ratios' logarithms. Passes
    at the same place have had the same prompts and have followed each other closely.
    """
    logs = [math.log(speed(one) / speed(other)) for one, other in zip(mine, theirs, strict=True)]
    middle = statistics.fmean(logs)
    found: dict[str, float | None] = {name: math.exp(middle)}
    if len(logs) < 2:
        return found
    degrees = min(len(logs) - 1, len(STUDENT))
    half = STUDENT[degrees - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return {**found, f"{name}_low": math.exp(middle - half), f"{name}_high": math.exp(middle + half)}


def speed(one: Pass) -> float:
    """Output tokens per second."""
    return one.output_tokens / one.seconds


def same_as_plain(outcomes: Mapping[str, Outcome], name: str) -> tuple[int, int]:
    """How many answers of an arm were plain decoding's to the same prompt in the same round, and of how many."""
    pairs = list(zip(outcomes[name].passes, outcomes["plain"].passes, strict=True))
    return sum(mine.n_identical(plain) for mine, plain in pairs), sum(len(mine.completions) for mine, _ in pairs)


def _why(server: Halting, error: C2TError) -> str:
    """The error's line; of a server that has ended, how it ended, which is why it no longer answers."""
    try:
        server.check_alive()
    except C2TError as ended:
        return one_line(ended)
    return one_line(error)
