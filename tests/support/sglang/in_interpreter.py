"""Programs of this folder that run in Triton's interpreter, on the CPU engine's SGLang, and write what they found.

Triton reads the variable when a kernel is imported, hence a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.cpu_engine import cpu_engine_env
from tests.support.places import SGLANG, SUPPORT

TIMEOUT_S = 900


def found_by(program: str, folder: Path) -> Any:
    """What it writes into `folder`. program: a file of this folder, or a module that imports others of the checkout."""
    output = folder / "found.json"
    start = [str(SGLANG / program)] if program.endswith(".py") else ["-m", program]
    env = cpu_engine_env({**os.environ, "TRITON_INTERPRET": "1"})
    root = SUPPORT.parents[1]
    subprocess.run([sys.executable, *start, output], env=env, cwd=root, check=True, timeout=TIMEOUT_S)
    return json.loads(output.read_text())
