"""What a benchmark has to know of an engine: how its servers are started, told of an arm, and asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from benchmarks.cpu_engine.preloaded import Preloaded
from benchmarks.serving.arms import Options
from benchmarks.serving.client import Client

# On a CPU, where an engine waits in loops that leave others on its processors little (measured with Linux 6.18: a
# client had 4% of one and waited 93% of the time), so that requests went to the server one after the other.
NICENESS = 5


class Device(StrEnum):
    """GPU: whatever device the engine finds, with none of the flags for small models."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True)
class Launch:
    """How a server is started.

    start: its command up to the flags that its engine and device always get. flags: what it is asked for, which wins.
    niceness: everything else on the machine runs before it, by so much. grace: seconds that it has to end by itself.
    preloaded: a process that has imported the engine and forks the server, None where the server imports by itself.
    """

    start: tuple[str, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    niceness: int = 0
    grace: float = 0.0
    preloaded: Callable[[], Preloaded | None] = lambda: None


class Engine(Protocol):
    """name: in the table of arms and in rows. client: what measures its servers. layout_has_classifiers: a draft of
    `layout` has its classifier beside it."""

    name: str
    client: type[Client]
    layout_has_classifiers: bool

    def flags(self, options: Options) -> list[str]:
        """An arm's options as flags of the server."""

    def room(self, requests: int) -> list[str]:
        """Flags of a server that runs so many requests at once, at most."""

    def no_prefixes(self) -> list[str]:
        """Flags of a server that keeps no prefixes: a prompt that is sent again would find its own."""

    def layout(self, pair: Path, out: Path) -> Path:
        """The folder of a pair's checkpoints as this engine loads them, made in `out` if the pair's will not do."""

    def launch(
        self, target: Path, flags: Sequence[str], device: Device, environment: Mapping[str, str] | None = None
    ) -> Launch:
        """A server of a target. environment: None for this process's."""
