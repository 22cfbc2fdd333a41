"""`python -m benchmarks.report`."""

import sys

from benchmarks.command import run
from benchmarks.report.command import main

if __name__ == "__main__":
    sys.exit(run(main))
