"""A SGLang server on a GPU as a context manager, with this repository's plugin whether it is installed or not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from c2t_plugin.engines.sglang.cpu_engine import processes
from c2t_plugin.errors import C2TError

ROOT = Path(__file__).resolve().parent.parent
PORT = 30_517
LOG_TAIL = 12
# The Triton backend, bfloat16, nothing that a machine without a network would have to fetch or to compile for minutes
FLAGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--dtype", "bfloat16"),
    *("--mm-feature-transport", "cpu", "--disable-flashinfer-autotune", "--disable-prefill-cuda-graph"),
    *("--disable-radix-cache", "--skip-server-warmup", "--mem-fraction-static", "0.7"),
)


def plugin_environment(scratch: Path) -> dict[str, str]:
    """This process's environment with the repository on Python's path, and the entry point of its plugin.

    scratch: where the entry point's metadata is written; SGLang finds plugins by installed metadata alone.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = scratch / f"c2t_plugin-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    path = [str(ROOT), str(ROOT / "kernels"), str(scratch), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in path if part)}


class GpuServer:
    """Starts the server on entry, kills its whole session on exit; it also dies with this process."""

    def __init__(
        self, model: Path, *flags: str, log: Path, environment: Mapping[str, str], start_timeout: float
    ) -> None:
        self.base_url = f"http://127.0.0.1:{PORT}"
        self._command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *FLAGS]
        self._command += ["--host", "127.0.0.1", "--port", str(PORT), *flags]
        self._log, self._environment, self._start_timeout = log, environment, start_timeout

    def __enter__(self) -> Self:
        self._scratch = tempfile.mkdtemp(prefix="c2t-")
        supervise = [sys.executable, "-m", "c2t_plugin.engines.sglang.cpu_engine.supervise", str(os.getpid())]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                supervise + self._command,
                env={**self._environment, "TMPDIR": self._scratch},
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _wait(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        while not _healthy(self.base_url):
            if self._process.poll() is not None:
                raise C2TError(f"the server ended with {self._process.returncode} before it was ready; {self._tail()}")
            if time.monotonic() > deadline:
                raise C2TError(f"the server was not ready after {self._start_timeout:.0f} s; {self._tail()}")
            time.sleep(0.5)

    def _tail(self) -> str:
        """One line, for a row of results."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        return f"{self._log.name} ends with: {' | '.join(line.strip() for line in lines if line.strip())[-600:]}"

    def _stop(self) -> None:
        left = processes.kill_session(self._process)
        shutil.rmtree(self._scratch, ignore_errors=True)
        if left:
            raise C2TError(f"processes {left} of the server did not end: kill them by hand")


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
