"""Stock servers as the benchmarks start them, on a GPU or on the CPU engine; one line says why one does not start."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from c2t_plugin.engines.server_process import ServerError
from c2t_plugin.engines.sglang.cpu_engine.server import CpuServer
from c2t_plugin.errors import C2TError

LINE_WIDTH = 300
# How engines end a log that says why they do not start: a raised error, or argparse's complaint.
COMPLAINT = re.compile(r"^(?:[\w.]*(?:Error|Exception)\b|[\w.]+: error): ?.*")


class Server(CpuServer):
    """As CpuServer; without `cpu` on whatever device SGLang finds, with none of the flags for small models."""

    def __init__(self, model: Path, flags: Sequence[str], log: Path, cpu: bool, start_timeout: float) -> None:
        super().__init__(model, *flags, log=log, start_timeout=start_timeout)
        self._cpu = cpu
        if not cpu:
            self.common_flags = ()

    def environment(self) -> Mapping[str, str]:
        return super().environment() if self._cpu else self.env

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except ServerError as error:
            raise C2TError(f"the server did not start: {complaint(self.log)}") from error


def complaint(log: Path) -> str:
    """The line of a server's log that says why it ended: its last error, else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if COMPLAINT.match(line)]
    return (errors or lines or ["its log is empty"])[-1][:LINE_WIDTH]
