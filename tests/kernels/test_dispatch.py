"""The public functions: each has a reference and a kernel of the same arguments, and picks between them by device."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import c2t_kernels
from tests.support.kernels.sides import OPERATIONS, PACKAGES, fused, reference

ROOT = Path(c2t_kernels.__file__).parent
# its tensor decides which side runs
BY_DEVICE = set(OPERATIONS)


def functions(package: Any) -> set[str]:
    return {name for name in package.__all__ if inspect.isfunction(getattr(package, name))}


def parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def test_every_package_of_an_operation_is_exported():
    packages = [path for path in ROOT.iterdir() if (path / "__init__.py").is_file()]
    with_a_kernel = {path.name for path in packages if (path / "reference.py").is_file()} - {"network"}
    assert with_a_kernel == {package.rpartition(".")[2] for package in PACKAGES.values()}
    assert functions(c2t_kernels) == BY_DEVICE
    for name, package in PACKAGES.items():
        assert getattr(import_module(package), name) is getattr(c2t_kernels, name)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_kernel_takes_what_the_reference_takes_and_options(name: str):
    shared = parameters(getattr(reference, name))
    kernel = parameters(getattr(fused, name))
    assert parameters(getattr(c2t_kernels, name)) == shared
    assert [item for item in kernel if item.name in {each.name for each in shared}] == shared
    options = kernel[len(shared) :]
    assert all(item.kind is inspect.Parameter.KEYWORD_ONLY and item.default is None for item in options)


@pytest.mark.parametrize("by_place", [True, False], ids=["by_place", "by_name"])
@pytest.mark.parametrize("side", ["reference", "kernel"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_device_decides_and_arguments_arrive(name: str, side: str, by_place: bool, monkeypatch: pytest.MonkeyPatch):
    # every argument an object of its own that only knows where it is
    given = {item.name: SimpleNamespace(is_cuda=side == "kernel") for item in parameters(getattr(reference, name))}
    named = {item.name for item in parameters(getattr(reference, name)) if item.kind is inspect.Parameter.KEYWORD_ONLY}
    placed = [value for key, value in given.items() if by_place and key not in named]
    calls: list[tuple[str, dict[str, Any]]] = []
    answer = object()

    def recorder(module: str, signature: inspect.Signature) -> Any:
        def record(*args: Any, **kwargs: Any) -> object:
            calls.append((module, signature.bind(*args, **kwargs).arguments))
            return answer

        return record

    for each in ("reference", "kernel"):
        module = import_module(f"{PACKAGES[name]}.{each}")
        monkeypatch.setattr(module, name, recorder(each, inspect.signature(getattr(module, name))))
    returned = getattr(c2t_kernels, name)(*placed, **dict(list(given.items())[len(placed) :]))
    assert [module for module, _ in calls] == [side]
    assert calls[0][1] == given
    # these write their state in place
    assert returned is (None if name in ("score_chain", "score_step") else answer)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_operation_documents_both_sides(name: str):
    said, _, on_a_gpu = getattr(c2t_kernels, name).__doc__.partition("On a GPU:")
    shared = inspect.signature(getattr(c2t_kernels, name)).parameters
    assert [word for word in shared if not re.search(rf"\b{word}\b", said)] == []
    more = [item.name for item in parameters(getattr(fused, name)) if item.name not in shared]
    assert on_a_gpu.strip() and all(word in on_a_gpu for word in more)


def test_a_tensor_of_the_cpu_gets_the_reference():
    packed = c2t_kernels.pack_ragged(torch.zeros(1, dtype=torch.int32), [torch.arange(3)[None]], capacity=2, pads=[9])
    assert packed.values[0].tolist() == [0, 9]


def triton_imports(path: Path) -> list[str]:
    """Modules of Triton that a file names in an import, at any level."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [name for name in names if name.split(".")[0] == "triton"]


def test_triton_stays_within_the_kernels():
    users = {path.relative_to(ROOT) for path in ROOT.rglob("*.py") if triton_imports(path)}
    assert users
    assert not [path for path in users if len(path.parts) < 2 or path.name in ("__init__.py", "reference.py")]
    assert {path.parent.name for path in users if path.name == "kernel.py"} == {path.parent.name for path in users}


BLOCKED = """
import importlib.abc
import sys


class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")


sys.meta_path.insert(0, NoTriton())
import torch

import c2t_kernels

print(c2t_kernels.draft_stats(torch.zeros(1, 4), 4).entropy.shape)
assert "triton" not in sys.modules
try:
    import c2t_kernels.stats.kernel
except ModuleNotFoundError as error:
    print(error.name)
"""


@pytest.mark.slow
def test_everything_but_the_kernels_works_without_triton():
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["torch.Size([1])", "triton"]
