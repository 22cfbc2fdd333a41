"""`python -m benchmarks.pairs.inflated`."""

import sys

from benchmarks.command import run
from benchmarks.pairs.inflated.command import main

if __name__ == "__main__":
    sys.exit(run(main))
