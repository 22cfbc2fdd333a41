"""An engine's stock server as a context manager, on a GPU or on the CPU engine; nothing of it is left behind."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import httpx

from c2t_plugin.engines.sglang.cpu_engine import cpu_engine_env, processes
from c2t_plugin.engines.sglang.cpu_engine.server import SMALL_MODEL_FLAGS
from c2t_plugin.errors import C2TError

HOST = "127.0.0.1"
POLL_S, ASK_TIMEOUT_S = 0.5, 5.0
LOG_WIDTH = 300
# How engines end a log that says why they do not start: a raised error, or argparse's complaint.
COMPLAINT = re.compile(r"^(?:[\w.]*(?:Error|Exception)\b|[\w.]+: error): ?.*")


class Server:
    """Starts `python -m sglang.launch_server` on entry and kills all its processes on exit.

    flags: besides model, host and port. cpu: on the CPU engine, with the flags of small models before `flags`.
    """

    def __init__(self, model: Path, flags: Sequence[str], log: Path, cpu: bool, start_timeout: float) -> None:
        self.model, self.flags, self.log, self.cpu = model, tuple(flags), log, cpu
        self.start_timeout = start_timeout
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch = ""

    def __enter__(self) -> Self:
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            port = listener.getsockname()[1]
        self.url = f"http://{HOST}:{port}"
        self._scratch = tempfile.mkdtemp(prefix="c2t-")
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += [*(SMALL_MODEL_FLAGS if self.cpu else ()), "--host", HOST, "--port", str(port), *self.flags]
        supervise = [sys.executable, "-m", "c2t_plugin.engines.sglang.cpu_engine.supervise", str(os.getpid())]
        env = {**os.environ, "TMPDIR": self._scratch}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                supervise + command,
                env=cpu_engine_env(env) if self.cpu else env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout
        while not _healthy(self.url):
            if self._process.poll() is not None:
                raise C2TError(f"the server did not start: {complaint(self.log)}")
            if time.monotonic() > deadline:
                raise C2TError(f"the server was not ready after {self.start_timeout:.0f} s; its log is {self.log.name}")
            time.sleep(POLL_S)

    def _stop(self) -> None:
        process, self._process = self._process, None
        left = [] if process is None else processes.kill_session(process)
        shutil.rmtree(self._scratch, ignore_errors=True)
        if left:
            raise C2TError(f"processes {left} of the server did not end: kill them by hand")


def complaint(log: Path) -> str:
    """The line of a server's log that says why it ended: its last error, else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if COMPLAINT.match(line)]
    return (errors or lines or ["its log is empty"])[-1][:LOG_WIDTH]


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=ASK_TIMEOUT_S, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
