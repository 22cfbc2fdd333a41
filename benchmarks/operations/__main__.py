"""`python -m benchmarks.operations`: prints the table of the engine that is installed, on any machine without a GPU."""

import importlib.util
import os
import subprocess
import sys

from benchmarks.cpu_engine import cpu_engine_env

PROGRAM = "from benchmarks.operations.table import counts, printed; print(printed(counts()))"

if __name__ == "__main__":
    # Triton reads the variable when a kernel is imported, hence a process of its own
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    if importlib.util.find_spec("sglang") is not None:
        env = cpu_engine_env(env)
    sys.exit(subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=False).returncode)
