"""The `vllm` command of an environment in which it knows its version, as docs/vllm.md has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

VERSION = "0.32.0+cpu"


def vllm_command(folder: Path, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The words of the command, and its environment. folder: for the distribution that the command asks for."""
    distribution = folder / f"vllm-{VERSION}.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(f"Name: vllm\nVersion: {VERSION}\n")
    path: Sequence[str] = [each for each in (environment.get("PYTHONPATH"), str(folder)) if each]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    return command, {**environment, "PYTHONPATH": os.pathsep.join(path)}
