"""`python -m benchmarks.papers`."""

import sys

from benchmarks.command import run
from benchmarks.papers.command import main

if __name__ == "__main__":
    sys.exit(run(main))
