"""`python -m benchmarks.simulation`."""

import sys

from benchmarks.command import run
from benchmarks.simulation.command import main

if __name__ == "__main__":
    sys.exit(run(main))
