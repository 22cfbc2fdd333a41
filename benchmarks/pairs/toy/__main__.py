"""`python -m benchmarks.pairs.toy`."""

import sys

from benchmarks.command import run
from benchmarks.pairs.toy.cli import main

if __name__ == "__main__":
    sys.exit(run(main))
