"""Servers that start from a process which has imported SGLang already.

Importing SGLang takes 7 s of processor time in each of a server's three processes, which on two cores is most of its
start. `Preloaded` imports once and forks: first the server, then, from a child that the server made before it did
anything else, what the server starts by multiprocessing. Each begins with the environment and the arguments that it
would have had, and pickles as it would have.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu_engine import cpu_engine_env

# Variables that imports read; where one differs from the preloaded process's the server starts by itself.
_READ_BY_IMPORTS = ("CUDA", "HF_", "MKL", "OMP_", "OPENBLAS", "SGLANG_", "TORCH", "TRITON_")
_PRELOADED: list[Preloaded] = []
_POLL_S = 0.05


class ForkedServer:
    """What subprocess.Popen offers of a server that `Preloaded` started."""

    def __init__(self, preloaded: Preloaded, pid: int) -> None:
        self.pid = pid
        self._preloaded = preloaded

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._preloaded.ask({"poll": self.pid})["code"]

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; subprocess.TimeoutExpired if it still runs after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("server", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """SIGINT asks the server to end, as it does a supervised one."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM if number == signal.SIGINT else number)


class Preloaded:
    """A process that has imported SGLang and forks servers; ends when it is closed or this process ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self.imports = _import_environment(environment)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cpu_engine.preloading", str(theirs.fileno())],
            cwd=Path(__file__).resolve().parents[2],
            env=dict(environment),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._stream = ours.makefile("rw", encoding="utf-8")
        ours.close()
        self.modules = frozenset(self._answer()["modules"])

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path, niceness: int) -> ForkedServer:
        """Fork a server. command: `[python, "-m", MODULE, ...]`. log: gets its output."""
        values = {"command": list(command), "environment": dict(environment), "log": str(log.resolve())}
        return ForkedServer(self, self.ask({**values, "cwd": os.getcwd(), "niceness": niceness})["pid"])

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The process's answer to one request."""
        self._stream.write(json.dumps(request) + "\n")
        self._stream.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._stream.readline()
        if not line:
            raise EOFError("the preloaded SGLang process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End it and the servers that it still has."""
        with contextlib.suppress(BrokenPipeError):
            self._stream.close()
        self._process.wait()


def preloaded_for(environment: Mapping[str, str]) -> Preloaded | None:
    """The process to fork a server with this environment from; None if imports would differ there."""
    usual = cpu_engine_env(os.environ)
    if not _PRELOADED and _import_environment(environment) == _import_environment(usual):
        _PRELOADED.append(Preloaded(usual))
    found = next((each for each in _PRELOADED if each.imports == _import_environment(environment)), None)
    if found is None or not _adds_only_new_modules(environment, usual, found.modules):
        return None
    return found


def close_all() -> None:
    """End the preloaded process, and the servers that it still has."""
    while _PRELOADED:
        _PRELOADED.pop().close()


def _import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_BY_IMPORTS)}


def _adds_only_new_modules(environment: Mapping[str, str], usual: Mapping[str, str], modules: frozenset[str]) -> bool:
    """Whether PYTHONPATH leaves alone what has been imported: no other SGLang, nothing to run at start."""
    known = set(usual["PYTHONPATH"].split(os.pathsep))
    for part in filter(None, environment["PYTHONPATH"].split(os.pathsep)):
        names = set() if part in known else {path.name.partition(".")[0] for path in Path(part).glob("*")}
        if names & modules or "sitecustomize" in names:
            return False
    return True
