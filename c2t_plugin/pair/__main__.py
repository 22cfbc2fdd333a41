"""`python -m c2t_plugin.pair` is `c2t pair`."""

from __future__ import annotations

import sys

from c2t_plugin.pair.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
