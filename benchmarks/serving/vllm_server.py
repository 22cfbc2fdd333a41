"""vLLM's own OpenAI server as a context manager; nothing of it is left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.serving.process import HOST, START_TIMEOUT_S, ServerProcess

MODEL = "pair"
SMALL_MODEL_FLAGS = (
    *("--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(2**28)),
)
STOP_TIMEOUT_S = 60.0
# On a CPU, where the engine waits in loops that leave others on its processors little (measured with Linux 6.18: a
# client had 4% of one and waited 93% of the time), so that requests went to the server one after the other.
NICENESS = 5


def command(target: Path, port: int, *flags: str, cpu: bool = True) -> list[str]:
    """The `vllm` command of the CPU wheel ends with PackageNotFoundError; the module that it would start does not."""
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    server += ["--host", HOST, "--port", str(port), "--served-model-name", MODEL]
    return [*server, *(SMALL_MODEL_FLAGS if cpu else ()), *flags]


def environment() -> dict[str, str]:
    """Of the server: with the routes that control C2T and empty the prefix cache."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return {**os.environ, **own, "VLLM_NO_USAGE_STATS": "1"}


class VllmServer(ServerProcess):
    """Asked to end as an operator would. cpu: with the flags for small models; else on whatever device vLLM finds."""

    def __init__(
        self, target: Path, flags: Sequence[str], log: Path, cpu: bool = True, start_timeout: float = START_TIMEOUT_S
    ) -> None:
        super().__init__(log=log, start_timeout=start_timeout, grace=STOP_TIMEOUT_S)
        self._target, self._flags, self._cpu = target, flags, cpu
        self.niceness = NICENESS if cpu else 0

    def command(self, port: int) -> list[str]:
        return command(self._target, port, *self._flags, cpu=self._cpu)

    def environment(self) -> Mapping[str, str]:
        return environment()
