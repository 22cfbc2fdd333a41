"""vLLM's own OpenAI server as a context manager, for small models on a CPU; nothing of it is left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from c2t_plugin.engines.server_process import HOST, ServerProcess

MODEL = "pair"
SMALL_MODEL_FLAGS = (
    *("--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(2**28)),
)
STOP_TIMEOUT_S = 60.0


def command(target: Path, port: int, *flags: str) -> list[str]:
    """The `vllm` command of the CPU wheel ends with PackageNotFoundError; the module that it would start does not."""
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    return [*server, "--host", HOST, "--port", str(port), "--served-model-name", MODEL, *SMALL_MODEL_FLAGS, *flags]


def environment() -> dict[str, str]:
    """Of the server: with the routes that control C2T and empty the prefix cache."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return {**os.environ, **own, "VLLM_NO_USAGE_STATS": "1"}


class _Server(ServerProcess):
    def __init__(self, target: Path, flags: Sequence[str], log: Path) -> None:
        super().__init__(log=log, grace=STOP_TIMEOUT_S)
        self._target, self._flags = target, flags

    def command(self, port: int) -> list[str]:
        return command(self._target, port, *self._flags)

    def environment(self) -> Mapping[str, str]:
        return environment()


@contextmanager
def serving(target: Path, log: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """Base URL of a running server, asked to end as an operator would. Raises ServerError if it does not start."""
    with _Server(target, flags, log) as server:
        yield server.base_url
