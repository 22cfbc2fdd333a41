"""vLLM's own OpenAI server as a context manager, for small models on a CPU; nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from c2t_plugin.engines.sglang.cpu_engine.processes import kill_session
from c2t_plugin.errors import C2TError

HOST = "127.0.0.1"
MODEL = "pair"
SMALL_MODEL_FLAGS = (
    *("--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(2**28)),
)
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.5
LOG_TAIL = 2000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def command(target: Path, port: int, *flags: str) -> list[str]:
    """The `vllm` command of the CPU wheel ends with PackageNotFoundError; the module that it would start does not."""
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    return [*server, "--host", HOST, "--port", str(port), "--served-model-name", MODEL, *SMALL_MODEL_FLAGS, *flags]


def environment() -> dict[str, str]:
    """Of the server: with the routes that control C2T and empty the prefix cache."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return {**os.environ, **own, "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def serving(target: Path, log: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """Base URL of a running server, asked to end as an operator would. Raises C2TError if it does not start."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(target, port, *flags),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(process, url, log)
        yield url
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    finally:
        left = kill_session(process)
    if left:
        raise C2TError(f"processes {left} of the server did not end: kill them by hand")


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _healthy(url):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
            raise C2TError(f"vLLM's server did not start; its log ends:\n{tail}")
        time.sleep(POLL_S)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
