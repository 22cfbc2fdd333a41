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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu_engine import cpu_engine_env

# Variables that imports read; where one of them differs from all preloaded processes' a server starts by itself.
_READ_BY_IMPORTS = ("CUDA", "HF_", "MKL", "OMP_", "OPENBLAS", "SGLANG_", "TORCH", "TRITON_")
# Of those, the ones that SGLang (0.5.23) and PyTorch read when they need them, so that a fork has them in time. PyTorch
# sets its own as some of transformers' models first run, between two servers of a test.
_READ_LATE = (
    *("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_HOST_IP"),
    *("SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS", "SGLANG_RUST_SERVER", "TORCHINDUCTOR_CACHE_DIR"),
)
# What several servers add for imports to read. Each line is a process of its own, from when it is first wanted.
_SHARED: tuple[dict[str, str], ...] = (
    {},
    {"TRITON_INTERPRET": "1"},
    {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"},
)
# As it was before anybody changed it for a server.
_FOLDERS = os.environ.get("PYTHONPATH", "")
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
        self.path = _path(environment)
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
    """The process to fork a server with this environment from, started if need be; None if imports would differ."""
    if found := _known(environment):
        return found
    usual, wanted = _usual(), _import_environment(environment)
    started = [each.imports for each in _PRELOADED if each.path <= _path(usual)]
    for more in _SHARED:
        if _import_environment({**usual, **more}) == wanted and wanted not in started:
            _PRELOADED.append(Preloaded({**usual, **more}))
    return _known(environment)


@contextlib.contextmanager
def preloaded_with(environment: Mapping[str, str]) -> Iterator[None]:
    """While it lasts, servers with the folders of this environment's PYTHONPATH are forked from a process of their own,
    which may have another SGLang than the others."""
    own = Preloaded(environment)
    _PRELOADED.append(own)
    try:
        yield
    finally:
        if own in _PRELOADED:
            _PRELOADED.remove(own)
        own.close()


def close_all() -> None:
    """End the preloaded processes, and the servers that they still have."""
    while _PRELOADED:
        _PRELOADED.pop().close()


def _usual() -> dict[str, str]:
    return cpu_engine_env({**os.environ, "PYTHONPATH": _FOLDERS})


def _known(environment: Mapping[str, str]) -> Preloaded | None:
    wanted, path = _import_environment(environment), _path(environment)
    for each in _PRELOADED:
        if each.imports == wanted and each.path <= path | _path(_usual()) and _adds_only_new_modules(path, each):
            return each
    return None


def _import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    read = {name: value for name, value in environment.items() if name.startswith(_READ_BY_IMPORTS)}
    return {name: value for name, value in read.items() if name not in _READ_LATE}


def _path(environment: Mapping[str, str]) -> frozenset[str]:
    return frozenset(filter(None, environment["PYTHONPATH"].split(os.pathsep)))


def _adds_only_new_modules(path: frozenset[str], preloaded: Preloaded) -> bool:
    """Whether these folders leave alone what has been imported: no other SGLang, nothing to run at start."""
    for part in path - preloaded.path:
        names = {each.name.partition(".")[0] for each in Path(part).glob("*")}
        if names & preloaded.modules or "sitecustomize" in names:
            return False
    return True
