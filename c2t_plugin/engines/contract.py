"""What an adapter relies on in its engine, checked against the engine's source without importing it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from c2t_plugin import envs
from c2t_plugin.errors import ContractError


@dataclass(frozen=True)
class EngineSymbol:
    """One name of the engine that the adapter touches.

    file: relative to the engine's package. name: dotted, e.g. Class.method; a class attribute counts, and so does what
    a method sets on self or a file imports. params: names that the function must take, in this order (others may stand
    between or after).
    contains: text that the function's source must contain, whatever its white space: where the adapter relies on what
    a signature does not show.
    """

    file: str
    name: str
    params: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()


def listed(text: str) -> tuple[EngineSymbol, ...]:
    """Symbols from a list of lines.

    A line is a file; or, indented by 2, a name in it, alone or with the parameters that it must take, or "Class: name,
    ..."; or, indented by 4, what the source of the name above must contain.
    """
    found: list[EngineSymbol] = []
    file = ""
    for line in filter(None, text.splitlines()):
        depth = len(line) - len(line.lstrip())
        if not depth:
            file = line
        elif depth == 4:
            found[-1] = replace(found[-1], contains=(*found[-1].contains, line.strip()))
        elif ": " in line:
            owner, _, names = line.strip().partition(": ")
            found.extend(EngineSymbol(file, f"{owner}.{name}") for name in names.split(", "))
        else:
            name, _, params = line.strip().rstrip(")").partition("(")
            found.append(EngineSymbol(file, name, tuple(params.split(", ")) if params else ()))
    return tuple(found)


def symbols_of(engine: str) -> tuple[EngineSymbol, ...]:
    """Everything that any part of an engine's adapter relies on."""
    contract = importlib.import_module(f"c2t_plugin.engines.{engine}.contract")
    further = (getattr(contract, name, ()) for name in ("TREE_SYMBOLS", "DP_SYMBOLS"))
    found: tuple[EngineSymbol, ...] = sum(further, contract.SYMBOLS)
    return found


@lru_cache(maxsize=64)
def _module(path: Path) -> tuple[ast.Module, list[str]]:
    """Its tree and its lines."""
    source = path.read_text(encoding="utf-8")
    return ast.parse(source), source.split("\n")


def _definition(body: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
        if isinstance(node, ast.ImportFrom) and any(name == (alias.asname or alias.name) for alias in node.names):
            return node
    return next((node for node in body if _sets_on_self(node, name)), None)


def _sets_on_self(node: ast.stmt, name: str) -> bool:
    """Whether a method sets `self.name`."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return any(each.attr == name and isinstance(each.value, ast.Name) and each.value.id == "self" for each in stored)


# What is installed stays what it is while a process runs.
@lru_cache(maxsize=1024)
def _problem(root: Path, symbol: EngineSymbol) -> str | None:
    where = f"{symbol.file}: {symbol.name}"
    path = root / symbol.file
    if not path.is_file():
        return f"{where} (no such file)"
    tree, lines = _module(path)
    body: Sequence[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in symbol.name.split("."):
        node = _definition(body, part)
        if node is None:
            return f"{where} (not found)"
        body = getattr(node, "body", [])
    if symbol.params and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        found = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        remaining = iter(found)
        if not all(name in remaining for name in symbol.params):
            return f"{where} (takes {found}, the adapter passes {list(symbol.params)})"
    # whole lines: ast.get_source_segment splits the file anew for every symbol
    text = "" if node is None else "\n".join(lines[node.lineno - 1 : node.end_lineno])
    missing = [piece for piece in symbol.contains if _packed(piece) not in _packed(text)]
    return f"{where} (its body lacks {missing})" if missing else None


def _packed(text: str) -> str:
    return " ".join(text.split())


def broken_symbols(root: Path, symbols: Iterable[EngineSymbol]) -> list[str]:
    """One line per symbol of the engine at `root` (its package directory) that is not as the adapter needs it."""
    return [problem for symbol in symbols if (problem := _problem(root, symbol)) is not None]


def package_root(package: str) -> Path | None:
    """Directory of an installed package, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def engine_version(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def require_tested(tested: bool, release: str, supported: str) -> None:
    """Raise ContractError for a release of an engine that was not tested, unless it is asked for."""
    if not (envs.untested_release() or tested):
        raise ContractError(
            f"{release} is installed, C2T was tested with {supported}: install that, or set "
            "C2T_UNTESTED_RELEASE=1 to try yours"
        )


def check_contract(package: str, symbols: Iterable[EngineSymbol], supported: str) -> None:
    """Raise ContractError, naming symbol and version, if the installed engine is not as the adapter needs it."""
    root = package_root(package)
    if root is None:
        raise ContractError(f"{package} is not installed; C2T supports {supported}")
    broken = broken_symbols(root, symbols)
    if broken:
        raise ContractError(
            f"{package} {engine_version(package)} is not as C2T needs it: {'; '.join(broken)}. C2T supports {supported}"
        )
