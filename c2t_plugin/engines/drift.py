"""What of an engine's release is not as the adapter needs it, read off its source; nothing of it is imported or run.

    python -m c2t_plugin.engines.drift vllm WHEEL_OR_DIRECTORY

prints a line for each symbol that has drifted, or that none has. Exit status 1: some have. A release without drift is
not thereby supported: the tests have to pass on it too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from c2t_plugin.engines.contract import EngineSymbol, broken_symbols, symbols_of
from c2t_plugin.errors import ContractError

ENGINES = ("sglang", "vllm")


def drifted(source: Path, package: str, symbols: Iterable[EngineSymbol]) -> list[str]:
    """One line per symbol that is not as the adapter needs it. source: a wheel, or a directory that has the package or
    is it. Raises ContractError if it is neither."""
    symbols = tuple(symbols)
    if source.is_dir():
        inside = source / package
        root = inside if inside.is_dir() else source
        if not (root / "__init__.py").is_file():
            raise ContractError(f"{source} has no package {package}: name the directory that holds it, or a wheel")
        return broken_symbols(root, symbols)
    if not zipfile.is_zipfile(source):
        raise ContractError(f"{source} is neither a wheel nor a directory")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(source) as wheel:
        wanted = {f"{package}/{file}" for file in ("__init__.py", *(symbol.file for symbol in symbols))}
        for name in wanted & set(wheel.namelist()):
            wheel.extract(name, folder)
        return drifted(Path(folder), package, symbols)


def main(argv: list[str]) -> int:
    """Report on one release."""
    parser = argparse.ArgumentParser(
        prog="python -m c2t_plugin.engines.drift",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("source", type=Path, help="wheel, or directory with the engine's package")
    options = parser.parse_args(argv)
    symbols = symbols_of(options.engine)
    try:
        found = drifted(options.source, options.engine, symbols)
    except ContractError as error:
        print(f"drift: {error}", file=sys.stderr)
        return 2
    print("\n".join(found) or f"no drift: all {len(symbols)} symbols are as C2T needs them")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
