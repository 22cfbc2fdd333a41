"""What of an engine's release is not as the adapter needs it, read off its source; nothing of it is imported or run.

    python -m tests.support.engines.drift vllm WHEEL_OR_DIRECTORY
    python -m tests.support.engines.drift vllm WHEEL_OR_DIRECTORY --since OLDER     what changed in classes that we use

prints a line for each symbol that has drifted, of what C2T calls and of what it binds anew, and for each abstract
method that a subclass of ours lacks, or that there are none. What C2T does without where it is not there is a note.
With --since also one for each base, abstract method, signature or number of returned values that the contract's
classes had otherwise. Exit status 1: some have drifted or changed. A release without drift is not thereby
supported: the tests have to pass on it too.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from c2t_plugin.engines import contract
from c2t_plugin.engines.contract import EngineSymbol, broken_symbols, symbols_of
from c2t_plugin.errors import ContractError

ENGINES = ("sglang", "vllm")
ADAPTERS = Path(contract.__file__).parent
# of all files that are taken out of a wheel; an engine's largest has half a megabyte
MOST_BYTES = 64 << 20


@contextmanager
def package_of(source: Path, package: str, symbols: Iterable[EngineSymbol]) -> Iterator[Path]:
    """The engine's package with the files that the symbols are in. source: a wheel, or a directory that has the package
    or is it. Raises ContractError if it is neither, or unpacks to more than MOST_BYTES."""
    if source.is_dir():
        inside = source / package
        root = inside if inside.is_dir() else source
        if not (root / "__init__.py").is_file():
            raise ContractError(f"{source} has no package {package}: name the directory that holds it, or a wheel")
        yield root
        return
    if not zipfile.is_zipfile(source):
        raise ContractError(f"{source} is neither a wheel nor a directory")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(source) as wheel:
        wanted = {f"{package}/{file}" for file in ("__init__.py", *(symbol.file for symbol in symbols))}
        files = [each for each in wheel.infolist() if each.filename in wanted]
        if sum(each.file_size for each in files) > MOST_BYTES:
            raise ContractError(f"{source} unpacks to more than {MOST_BYTES >> 20} MiB, which is no engine's source")
        for each in files:
            wheel.extract(each, folder)
        with package_of(Path(folder), package, symbols) as root:
            yield root


# An item of a dictionary is looked for by the dictionary's name.
ITEMS = ("triton", "flashinfer", "fa3", "flashmla")


def symbol_of(target: str) -> EngineSymbol:
    """Of a patch's target, `engine.module:Class.name`."""
    module, _, name = target.partition(":")
    file = module.partition(".")[2].replace(".", "/") + ".py"
    return EngineSymbol(file, name.rpartition(".")[0] if name.rpartition(".")[2] in ITEMS else name)


def needed(engine: str) -> tuple[list[EngineSymbol], list[EngineSymbol]]:
    """What an adapter needs of its engine; and what it does without, where that is not there."""
    patches = importlib.import_module(f"c2t_plugin.engines.{engine}.patches")
    plain = getattr(patches, "PLAIN", None)
    # some are of a library that the engine calls
    own = [each for each in patches.PATCHES.patches if each.target.startswith(f"{engine}.")]
    missed = [symbol_of(each.target) for each in own if each.when and each.when == plain]
    bound = [symbol_of(each.target) for each in own]
    contract_of = importlib.import_module(f"c2t_plugin.engines.{engine}.contract")
    known = dict.fromkeys([*symbols_of(engine), *(each for each in bound if each not in missed)])
    return list(known), [*missed, *getattr(contract_of, "PLAIN_SYMBOLS", ())]


def drifted(source: Path, package: str, symbols: Iterable[EngineSymbol]) -> list[str]:
    """One line per symbol that is not as the adapter needs it, and per abstract method that a subclass of ours lacks.
    source: see package_of."""
    symbols = tuple(symbols)
    with package_of(source, package, symbols) as root:
        return broken_symbols(root, symbols) + list(_lacking(root, package, symbols))


def _lacking(root: Path, package: str, symbols: Iterable[EngineSymbol]) -> Iterator[str]:
    named = {(symbol.file, symbol.name.partition(".")[0]) for symbol in symbols}
    theirs = {name: (file, found) for file, name in sorted(named) if (found := _classes(root / file).get(name))}
    for path in sorted((ADAPTERS / package).rglob("*.py")):
        for ours in _classes(path).values():
            base = ast.unparse(ours.bases[0]) if len(ours.bases) == 1 else ""  # of several, another may have the method
            if base in theirs:
                file, found = theirs[base]
                lacking = [name for name, each in _methods(found).items() if _abstract(each)]
                for name in (name for name in lacking if name not in _methods(ours)):
                    yield f"{file}: {base} has the abstract method {name}, which {ours.name} lacks"


def changed(older: Path, newer: Path, package: str, symbols: Iterable[EngineSymbol]) -> list[str]:
    """One line per way in which a class that the symbols name is another one in the newer release."""
    symbols = tuple(symbols)
    found = []
    with package_of(older, package, symbols) as before, package_of(newer, package, symbols) as after:
        for file in dict.fromkeys(symbol.file for symbol in symbols):
            old, new = _classes(before / file), _classes(after / file)
            named = dict.fromkeys(s.name.partition(".")[0] for s in symbols if s.file == file)
            for name in (name for name in named if name in old and name in new):
                found += [f"{file}: {name} {line}" for line in _differences(old[name], new[name])]
    return found


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _differences(old: ast.ClassDef, new: ast.ClassDef) -> Iterator[str]:
    bases = [[ast.unparse(base) for base in each.bases] for each in (old, new)]
    if bases[0] != bases[1]:
        yield f"has the bases {', '.join(bases[1])}, not {', '.join(bases[0])}"
    methods, others = _methods(old), _methods(new)
    for name in sorted(set(others)):
        if _abstract(others[name]) and not (name in methods and _abstract(methods[name])):
            yield f"has a new abstract method {name}"
    for name in sorted(set(methods) & set(others)):
        mine, theirs = ast.unparse(methods[name].args), ast.unparse(others[name].args)
        if mine != theirs:
            yield f"takes {name}({theirs}), not ({mine})"
        if _returned(methods[name]) != _returned(others[name]):
            yield f"returns {_returned(others[name])} values from {name}, not {_returned(methods[name])}"


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def _abstract(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(each).endswith("abstractmethod") for each in function.decorator_list)


def _returned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[int]:
    """How many values a function may return, of its own return statements and not of those within it."""
    counts, todo = set(), list[ast.AST](function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Return) and node.value is not None:
            counts.add(len(node.value.elts) if isinstance(node.value, ast.Tuple) else 1)
        todo += ast.iter_child_nodes(node)
    return sorted(counts)


def main(argv: list[str]) -> int:
    """Report on one release."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.engines.drift",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("source", type=Path, help="wheel, or directory with the engine's package")
    parser.add_argument("--since", type=Path, help="an older release, to compare its classes with")
    options = parser.parse_args(argv)
    symbols, others_need = needed(options.engine)
    try:
        found = drifted(options.source, options.engine, symbols)
        notes = drifted(options.source, options.engine, others_need)
        others = changed(options.since, options.source, options.engine, symbols) if options.since else []
    except ContractError as error:
        print(f"drift: {error}", file=sys.stderr)
        return 2
    print("\n".join(found) or f"no drift: all {len(symbols)} symbols are as C2T needs them")
    for note in notes:
        print(f"note: {note}")
    if options.since:
        print("\n".join(others) or "no class of the contract is another one")
    return int(bool(found or others))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
