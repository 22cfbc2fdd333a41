"""`python -m benchmarks.gpu`."""

import sys

from benchmarks.command import run
from benchmarks.gpu.command import main

if __name__ == "__main__":
    sys.exit(run(main))
