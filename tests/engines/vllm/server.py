"""vLLM's own OpenAI server as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 400.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(target: Path, port: int, *options: str) -> list[str]:
    """The `vllm` command of the CPU wheel ends with PackageNotFoundError, its module does not."""
    fixed = {"--host": "127.0.0.1", "--port": str(port), "--dtype": "float32", "--max-model-len": "512"}
    fixed |= {"--served-model-name": "pair", "--max-num-seqs": "8", "--kv-cache-memory-bytes": str(2**28)}
    flags = [word for pair in fixed.items() for word in pair]
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--enforce-eager"),
        *flags,
        *options,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}


@contextmanager
def serving(target: Path, log: Path, *options: str) -> Iterator[str]:
    """Base URL of a running server; it is asked to end as an operator would, and must do so."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(
            command(target, port, *options), stdout=out, stderr=out, env=environment(), start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _healthy(url):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        yield url
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
