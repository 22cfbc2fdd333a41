"""Stubs for servers that take turns: started, halted and asked without a process, with answers by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from benchmarks.report.rows import CURVE
from benchmarks.serving import interleaved
from benchmarks.serving import server as serving_server
from benchmarks.serving.answers import Ask, Completion, Pass
from benchmarks.serving.engines import ENGINES, Launch
from benchmarks.serving.host import Host
from benchmarks.serving.real_pair import BINDING, THREADS, ChatPrompts
from c2t_plugin.errors import C2TError

HOST = Host("a CPU", 2, 2, 10.0, {tokens: 50.0 + tokens for tokens in CURVE})


@dataclass
class Stage:
    """What stubs do. refused: a word of the flags of servers that do not start. dead: of those that have died, by
    the number of turns that they get. odd: a prompt's first token whose answers differ under speculation. events:
    what happened, in order. lengths: of answers, that the last pass asked for."""

    refused: str = ""
    dead: dict[str, int] = field(default_factory=dict)
    odd: int = -1
    gap: float = 0.0001
    most_at_once: int = 99
    client_share: float = 0.1
    events: list[str] = field(default_factory=list)
    lengths: Sequence[int] = ()


class StubServer:
    """Its address is its flags."""

    stage: ClassVar[Stage] = Stage()

    def __init__(self, launch: Launch, *, log: Path, start_timeout: float) -> None:
        self.base_url = " ".join(launch.flags)
        self.name = log.stem

    def __enter__(self) -> StubServer:
        self.stage.events.append(f"start {self.name}")
        if self.stage.refused and self.stage.refused in self.base_url:
            raise C2TError("the server did not start: ValueError: no such option\nmore of the log")
        return self

    def __exit__(self, *exception: object) -> None:
        self.stage.events.append(f"end {self.name}")

    def halt(self) -> None:
        self.stage.events.append(f"halt {self.name}")

    def resume(self) -> None:
        self.stage.events.append(f"resume {self.name}")

    def check_alive(self) -> None:
        left = self.stage.dead.get(self.name)
        if left == 0:
            raise C2TError("the server ended with -9 while it was wanted; its log\nin two lines")
        if left is not None:
            self.stage.dead[self.name] = left - 1


class StubClient:
    """Twice as fast with speculation; an answer is its prompt's first token, three times."""

    lengths: Sequence[int] = ()

    def __init__(self, url: str, max_tokens: int) -> None:
        self.stage = StubServer.stage
        self.speculates = "--speculative" in url
        self.passes = 0

    def __enter__(self) -> StubClient:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def complete(self, prompt: Sequence[int], temperature: float = 0.0) -> Completion:
        first, steps = prompt[0], 2 if self.speculates else 0
        last = first + (self.speculates and first == self.stage.odd)
        return Completion((first, first, last), steps, steps, 3 * steps, first_s=0.1, last_s=0.3)

    def run(
        self, prompts: Sequence[Sequence[int]], concurrency: int, advance: Callable[[], None], temperature: float = 0.0
    ) -> Pass:
        self.stage.events.append(f"run {[prompt[0] for prompt in prompts]} {concurrency} {temperature:g}")
        self.stage.lengths = self.lengths
        self.passes += 1
        for _ in prompts:
            advance()
        seconds = 0.5 if self.speculates else 1.0
        completions = tuple(map(self.complete, prompts))
        return Pass(completions, seconds, min(concurrency, self.stage.most_at_once), 1.0, 0.1)

    def arrive(self, asks: Sequence[Ask], temperature: float = 0.0) -> Pass:
        self.stage.events.append(f"arrive {[ask.max_tokens for ask in asks]}")
        seconds = 0.5 if self.speculates else 1.0
        return Pass(tuple(self.complete(ask.prompt) for ask in asks), seconds, 2, 1.5, self.stage.client_share)

    def c2t_state(self) -> dict[str, object]:
        # a step's statistics take a tenth of its draft, and that a tenth of a pass
        return {"beta": "auto", "classifier_s": 0.005 * self.passes, "draft_s": 0.05 * self.passes}

    def top_two_gap(self, prompt: Sequence[int]) -> float:
        self.stage.events.append(f"gap {list(prompt)}")
        return self.stage.gap

    def pieces(self, prompt: Sequence[int]) -> Iterator[tuple[int, ...]]:
        yield from ((11,), (12, 13, 14), (15, 16))


def set_up(monkeypatch: pytest.MonkeyPatch, command: ModuleType, pair: Path, prompts: ChatPrompts) -> Stage:
    """The stage of a command whose servers and clients are stubs from here on."""
    monkeypatch.setattr(serving_server, "Server", StubServer)
    monkeypatch.setattr(StubServer, "stage", Stage())
    monkeypatch.setattr(interleaved, "SETTLE_S", 0.0)
    for engine in ENGINES.values():
        monkeypatch.setattr(type(engine), "client", StubClient)
    monkeypatch.setattr(command, "write_pair", lambda work: pair)
    monkeypatch.setattr(command, "chat_prompts", lambda target, part: prompts)
    # a GPU's command has none
    monkeypatch.setattr(command, "measure_host", lambda target, threads: HOST, raising=False)
    for name in (THREADS, BINDING):
        monkeypatch.setenv(name, "as before")
    return StubServer.stage
