"""`python -m benchmarks.operations`: prints the table, on any machine with SGLang and without a GPU."""

import os
import subprocess
import sys

from benchmarks.cpu_engine import cpu_engine_env

PROGRAM = "from benchmarks.operations.table import counts, printed; print(printed(counts()))"

if __name__ == "__main__":
    # Triton reads the variable when a kernel is imported, hence a process of its own
    env = cpu_engine_env({**os.environ, "TRITON_INTERPRET": "1"})
    sys.exit(subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=False).returncode)
