"""`python -m benchmarks.simulation.fleet`."""

import sys

from benchmarks.command import run
from benchmarks.simulation.fleet.command import main

if __name__ == "__main__":
    sys.exit(run(main))
