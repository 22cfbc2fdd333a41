"""What every part of the GPU run that starts servers is told."""

from __future__ import annotations

import argparse
from pathlib import Path


def part_parser(module: str, about: str, dry: str) -> argparse.ArgumentParser:
    """about: the part's docstring. dry: what --dry-run does."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and logs")
    parser.add_argument("--seconds", type=float, default=500.0, help="no server is started that would end later")
    parser.add_argument("--dry-run", action="store_true", help=dry)
    return parser
