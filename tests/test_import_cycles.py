"""No circle of imports in what the project is made of: whoever reads one module never has to know one that it serves.

An import inside a function counts too, since that is how a circle is hidden; one under TYPE_CHECKING does not, since
nothing is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("c2t_plugin", "kernels/c2t_kernels", "benchmarks")
Graph = dict[str, set[str]]


def sources() -> dict[str, tuple[str, bool]]:
    """Of every module its text, and whether it is a package."""
    found = {}
    for package in PACKAGES:
        above = (ROOT / package).parent
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(above).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found[name] = (path.read_text(encoding="utf-8"), is_package)
    return found


def import_graph(modules: Mapping[str, tuple[str, bool]]) -> Graph:
    """Which of these modules each of them imports."""
    return {name: _imported(name, *module, modules) - {name} for name, module in modules.items()}


def _imported(name: str, text: str, is_package: bool, modules: Mapping[str, object]) -> set[str]:
    here = name.split(".") if is_package else name.split(".")[:-1]
    found = set()
    for node in _imports(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        package = here[: len(here) + 1 - node.level] if node.level else []
        module = ".".join([*package, *filter(None, [node.module])])
        # a module of a package, or else a name of the package itself
        names = [f"{module}.{alias.name}" for alias in node.names]
        found |= {each if each in modules else module for each in names}
    return found & set(modules)


def _imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = iter(node.orelse)
    for child in children:
        yield from _imports(child)


def circles(graph: Graph) -> list[list[str]]:
    """The modules that import each other in a circle, one list for each knot of them."""
    reached = {name: _reachable(graph, name) for name in graph}
    knots = {tuple(sorted(each for each in reached[name] if name in reached[each])) for name in graph}
    return sorted(list(knot) for knot in knots if knot)


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph(sources())


def test_no_module_imports_what_imports_it(graph: Graph) -> None:
    assert len(graph) > 200 and "c2t_kernels.network" in graph["c2t_kernels.score"]
    assert circles(graph) == []


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("c2t_plugin.engines.vllm.patches", "from c2t_plugin.engines.vllm import cpu_guard"),
        ("c2t_plugin.engines.sglang.patches", "from c2t_plugin.engines.sglang.verify.packing import PackedVerify"),
        ("c2t_plugin.engines.vllm.v1", "def late():\n    from c2t_plugin.engines.vllm.worker import WorkerMixin"),
        ("c2t_kernels.network", "from ..score import score_chain"),
        ("benchmarks.serving.process", "import benchmarks.cpu_engine.server"),
    ],
)
def test_a_planted_circle_is_seen(graph: Graph, module: str, planted: str) -> None:
    is_package = module == "c2t_kernels.network"
    more = _imported(module, planted, is_package, graph)
    (knot,) = circles({**graph, module: graph[module] | more})
    assert module in knot and len(knot) > 1


def test_what_only_a_type_checker_imports_is_no_circle() -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b\nelse:\n    import c"
    modules = {"a": (guarded, False), "b": ("import a", False), "c": ("", False)}
    assert import_graph(modules) == {"a": {"c"}, "b": {"a"}, "c": set()}
    assert circles(import_graph(modules)) == []
