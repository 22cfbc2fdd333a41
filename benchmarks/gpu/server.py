"""A SGLang server on a GPU, with this repository's plugin whether it is installed or not."""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from benchmarks.serving.process import HOST, ServerProcess

ROOT = Path(__file__).resolve().parents[2]
LOG_TAIL = 12
# of entry points
SGLANG = "sglang.srt.plugins"
FLOAT32 = {"c2t-float32": "benchmarks.gpu.float32:register"}
# The Triton backend, bfloat16, nothing that a machine without a network would have to fetch or to compile for minutes
FLAGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--dtype", "bfloat16"),
    *("--mm-feature-transport", "cpu", "--disable-flashinfer-autotune", "--disable-prefill-cuda-graph"),
    *("--disable-radix-cache", "--skip-server-warmup", "--mem-fraction-static", "0.7"),
)


def part_parser(module: str, about: str, dry: str) -> argparse.ArgumentParser:
    """What every part of the GPU run that starts servers is told. about: its docstring. dry: what --dry-run does."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and logs")
    parser.add_argument("--seconds", type=float, default=500.0, help="no server is started that would end later")
    parser.add_argument("--dry-run", action="store_true", help=dry)
    return parser


def plugin_environment(scratch: Path, float32: bool = False) -> dict[str, str]:
    """This process's environment with the repository on Python's path, and the entry point of its plugin.

    scratch: where the entry point's metadata is written; SGLang finds plugins by installed metadata alone.
    float32: with what a SGLang server needs to compute in float32 on a GPU, see gpu_float32.py.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    added = FLOAT32 if float32 else {}
    project["entry-points"][SGLANG] |= added
    info = scratch / f"c2t_plugin-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    path = [str(ROOT), str(ROOT / "kernels"), str(scratch), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in path if part)}
    if allowed := environment.get("SGLANG_PLUGINS"):
        # a list of the only plugins that SGLang loads
        environment["SGLANG_PLUGINS"] = ",".join([allowed, *added])
    return environment


class GpuServer(ServerProcess):
    """`environment`: of the server, as `plugin_environment` makes it."""

    def __init__(
        self, model: Path, *flags: str, log: Path, environment: Mapping[str, str], start_timeout: float
    ) -> None:
        super().__init__(log=log, start_timeout=start_timeout)
        self._model, self._flags, self._environment = model, flags, environment

    def command(self, port: int) -> list[str]:
        start = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self._model), *FLAGS]
        return [*start, "--host", HOST, "--port", str(port), *self._flags]

    def environment(self) -> Mapping[str, str]:
        return self._environment

    def end_of_log(self) -> str:
        """One line, for a row of results."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        return f"{self.log.name} ends with: {' | '.join(line.strip() for line in lines if line.strip())[-600:]}"
