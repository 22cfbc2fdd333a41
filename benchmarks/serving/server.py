"""Stock servers as the benchmarks start them, on a GPU or a CPU; one line says why one does not start."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from benchmarks.cpu_engine.server import CpuServer
from benchmarks.serving import vllm_server
from benchmarks.serving.process import ServerError, ServerProcess
from benchmarks.serving.vllm_server import NICENESS
from c2t_plugin.errors import C2TError

LINE_WIDTH = 600
# how often SGLang tells what it runs, in decode steps: its own 15 are a whole short answer
LOADS = ("--load-snapshot-publish-interval", "4")
# How engines end a log that says why they do not start: a raised error, argparse's complaint, C2T's own or pydantic's
# line, which shows the whole input behind. vLLM writes the name of the process in front.
COMPLAINT = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:(?P<bare>[\w.]*(?:Error|Exception)):?$"
    r"|(?P<said>(?:[\w.]*(?:Error|Exception)|[\w.]+: error|C2T): ?.+|Value error, .*?(?= \[type=|$)))"
)
FRAME = re.compile(r'File ".*", line \d+, in (\w+)$')


class _OneLine(ServerProcess):
    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except ServerError as error:
            raise C2TError(f"the server did not start: {complaint(self.log)}") from error


class Server(_OneLine, CpuServer):
    """As CpuServer; without `cpu` on whatever device SGLang finds, with none of the flags for small models."""

    def __init__(self, model: Path, flags: Sequence[str], log: Path, cpu: bool, start_timeout: float) -> None:
        super().__init__(model, *flags, log=log, start_timeout=start_timeout)
        self._cpu = cpu
        self.niceness = NICENESS if cpu else 0
        # SGLang's adaptive mode makes a graph runner for each depth, which a CPU has not
        self.common_flags = (*self.common_flags, "--disable-cuda-graph") if cpu else ()
        self.common_flags += LOADS
        # a published head names the length that it was trained with, and SGLang runs it at the target's
        self.env |= {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}

    def environment(self) -> Mapping[str, str]:
        return super().environment() if self._cpu else self.env


class VllmServer(_OneLine, vllm_server.VllmServer):
    """As that one."""


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
