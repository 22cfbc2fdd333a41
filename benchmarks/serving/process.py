"""An engine's server as a context manager: it starts, answers, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from benchmarks.serving import sessions, supervise
from c2t_plugin.errors import C2TError

HOST = "127.0.0.1"
# By path, since the caller may be anywhere; -P, since its folder is no place to import from.
SUPERVISE = [sys.executable, "-P", supervise.__file__]
# What could take it before the server listens: outgoing connections, from 32768 on (Linux), and the rendezvous of the
# server's own processes, for which SGLang takes one of 22000 to 29999.
PORTS = range(10_000, 22_000)
START_TIMEOUT_S = 1200.0
_LOG_TAIL = 30
_LOG_WIDTH = 500
_POLL_S = 0.1


class ServerError(C2TError):
    """The server did not start, died, or refused a request."""


class Launched(Protocol):
    """A process that leads a session; subprocess.Popen is one."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class ServerProcess(ABC):
    """Runs a server on entry until it says that it is healthy, in a process session that it kills on exit.

    Standard output and error go to `log`. The session is also killed when this process dies without leaving the block
    (SIGTERM, SIGKILL), see `supervise`; Linux ties that to the thread that entered, so enter from a thread that lives
    as long as the server is wanted. With a `grace`, in seconds, a server whose block ends without an error is first
    asked to end, by SIGTERM, and has that long. With a `niceness` everything else on the machine runs before it, its
    client too. Raises ServerError if it is not ready within `start_timeout` seconds.
    """

    health = "/health"
    niceness = 0

    def __init__(self, *, log: str | Path, start_timeout: float = START_TIMEOUT_S, grace: float = 0.0) -> None:
        self.log = Path(log)
        self.start_timeout = start_timeout
        self.base_url = ""
        self.process: Launched | None = None
        self._grace = grace
        self._scratch: str | None = None

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """The server's command line."""

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """The environment of the server's process, but for TMPDIR."""

    def __enter__(self) -> Self:
        port = free_port()
        self.base_url = f"http://{HOST}:{port}"
        # engines leave their sockets behind when killed
        self._scratch = tempfile.mkdtemp(prefix="c2t-")
        self.log.write_bytes(b"")
        # each begins with nothing that an earlier one has measured, unless that is asked for
        environment = {"C2T_CACHE_DIR": "off", **self.environment(), "TMPDIR": self._scratch}
        self.process = self.launch(self.command(port), environment)
        try:
            self._wait_until_healthy()
        except BaseException:
            self._stop()
            raise
        return self

    def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> Launched:
        """Start the command as the leader of a session of its own, its output appended to the log."""
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [*SUPERVISE, str(os.getpid()), *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if self.niceness:
            sessions.give_way(process.pid, self.niceness)
        return process

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._grace and self.process is not None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(self._grace)
        self._stop()

    def halt(self) -> None:
        """Stop every process of the server where it stands, so that it takes no processor; until `resume`.

        The supervisor goes on: a stopped one could not end the others if this process died.
        """
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a server go on that `halt` stopped; nothing to one that runs or has ended."""
        self._signal_all(signal.SIGCONT)

    def check_alive(self) -> None:
        """ServerError, with the end of the log, if the server has ended."""
        code = None if self.process is None else self.process.poll()
        if code is not None:
            raise ServerError(f"the server ended with {code} while it was wanted; {self.end_of_log()}")

    def _signal_all(self, number: int) -> None:
        if self.process is not None:
            spared = [self.process.pid] if isinstance(self.process, subprocess.Popen) else []
            sessions.signal_session(self.process.pid, number, spared)

    def end_of_log(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL:]
        return "\n".join([f"the log {self.log} ends with:", *(line[:_LOG_WIDTH] for line in lines)])

    def _wait_until_healthy(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + self.start_timeout
        while not _answers(self.base_url + self.health):
            code = self.process.poll()
            if code is not None:
                raise ServerError(f"the server ended with {code} before it was ready; {self.end_of_log()}")
            if time.monotonic() > deadline:
                raise ServerError(f"the server was not ready after {self.start_timeout:.0f} s; {self.end_of_log()}")
            time.sleep(_POLL_S)

    def _stop(self) -> None:
        """Kill the process group and check that the whole session is gone."""
        process, self.process = self.process, None
        left = [] if process is None else sessions.kill_session(process)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if left:
            raise ServerError(f"processes {left} of the server did not end: kill them by hand")


def free_port() -> int:
    """A port that nothing listens on now. ServerError if there is none in PORTS."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as listener:
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ServerError(f"no port from {PORTS[0]} to {PORTS[-1]} is free")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False
