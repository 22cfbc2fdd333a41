"""A server of any engine, started for an arm; one line says why it did not start."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.serving.arms import Arm, Speculation
from benchmarks.serving.engines import Device, Engine, Launch
from benchmarks.serving.process import HOST, START_TIMEOUT_S, Launched, ServerError, ServerProcess

LINE_WIDTH = 600
LOG_TAIL = 12
# How engines end a log that says why they do not start: a raised error, argparse's complaint, C2T's own or pydantic's
# line, which shows the whole input behind. vLLM writes the name of the process in front.
COMPLAINT = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:(?P<bare>[\w.]*(?:Error|Exception)):?$"
    r"|(?P<said>(?:[\w.]*(?:Error|Exception)|[\w.]+: error|C2T): ?.+|Value error, .*?(?= \[type=|$)))"
)
FRAME = re.compile(r'File ".*", line \d+, in (\w+)$')


class Server(ServerProcess):
    """Runs what an engine's `launch` says.

    A server that does not start is a ServerError of two lines: what its log complains of; how it ended, with the end of
    its log.
    """

    def __init__(self, launch: Launch, *, log: str | Path, start_timeout: float = START_TIMEOUT_S) -> None:
        super().__init__(log=log, start_timeout=start_timeout, grace=launch.grace)
        self.niceness = launch.niceness
        self._start = launch

    def command(self, port: int) -> list[str]:
        return [*self._start.start, "--host", HOST, "--port", str(port), *self._start.flags]

    def environment(self) -> Mapping[str, str]:
        return self._start.environment

    def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> Launched:
        preloaded = self._start.preloaded()
        if preloaded is None:
            return super().launch(command, environment)
        return preloaded.start(command, environment, self.log, self.niceness)

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except ServerError as error:
            raise ServerError(f"the server did not start: {complaint(self.log)}\n{error}") from error

    def end_of_log(self) -> str:
        """One line, for a row of results."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        return f"{self.log.name} ends with: {' | '.join(line.strip() for line in lines if line.strip())[-LINE_WIDTH:]}"


@dataclass(frozen=True)
class Runner:
    """Starts servers of one engine and one target, an arm each.

    out: folder of their logs. flags: of every server; an arm's own win. environment: of every server, None for this
    process's.
    """

    engine: Engine
    device: Device
    target: Path
    out: Path
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    start_timeout: float = START_TIMEOUT_S

    def server(self, name: str, arm: Arm, on: Speculation, *more: str) -> Server:
        """A server of an arm, to be entered. name: of its log. more: flags that win over the arm's.

        C2TError, in one line, where the engine has no such arm.
        """
        flags = [*self.flags, *self.engine.flags(arm.options(self.engine.name, on)), *more]
        launch = self.engine.launch(self.target, flags, self.device, self.environment)
        return Server(launch, log=self.log(name), start_timeout=self.start_timeout)

    def log(self, name: str) -> Path:
        """Where a server of this name logs."""
        return self.out / f"{re.sub('[^A-Za-z0-9.]+', '-', name)}.log"


def complaint(log: Path) -> str:
    """The line of a server's log that says why it ended: its last error, with the function that raised it where the
    error has no message; else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    found, where = (lines or ["its log is empty"])[-1], ""
    for line in lines:
        if frame := FRAME.search(line):
            where = f" in {frame.group(1)}"
        elif error := COMPLAINT.match(line):
            found = error["said"] or error["bare"] + where
    return found[:LINE_WIDTH]
