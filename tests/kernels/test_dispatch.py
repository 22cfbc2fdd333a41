"""The public functions: each has a reference and a kernel of the same arguments, and picks between them by device."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import c2t_kernels
from c2t_kernels import fused, reference

ROOT = Path(c2t_kernels.__file__).parent
# counts blocks for tables, on the host
WITHOUT_A_KERNEL = {"nonempty_blocks"}


def functions(package: Any) -> set[str]:
    return {name for name in package.__all__ if inspect.isfunction(getattr(package, name))}


def parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


DISPATCHED = sorted(functions(c2t_kernels) - WITHOUT_A_KERNEL)


def test_every_reference_is_exported_and_has_a_kernel():
    assert set(c2t_kernels.__all__) == set(reference.__all__)
    assert functions(reference) == functions(fused) | WITHOUT_A_KERNEL
    assert functions(fused) == set(DISPATCHED)


@pytest.mark.parametrize("name", DISPATCHED)
def test_the_kernel_takes_what_the_reference_takes_and_options(name: str):
    shared = parameters(getattr(reference, name))
    kernel = parameters(getattr(fused, name))
    assert parameters(getattr(c2t_kernels, name)) == shared
    assert [item for item in kernel if item.name in {each.name for each in shared}] == shared
    options = kernel[len(shared) :]
    assert all(item.kind is inspect.Parameter.KEYWORD_ONLY and item.default is None for item in options)


@pytest.mark.parametrize("by_place", [True, False], ids=["by_place", "by_name"])
@pytest.mark.parametrize("side", ["reference", "fused"])
@pytest.mark.parametrize("name", DISPATCHED)
def test_the_device_decides_and_arguments_arrive(name: str, side: str, by_place: bool, monkeypatch: pytest.MonkeyPatch):
    # every argument an object of its own that only knows where it is
    given = {item.name: SimpleNamespace(is_cuda=side == "fused") for item in parameters(getattr(reference, name))}
    named = {item.name for item in parameters(getattr(reference, name)) if item.kind is inspect.Parameter.KEYWORD_ONLY}
    placed = [value for key, value in given.items() if by_place and key not in named]
    calls: list[tuple[str, dict[str, Any]]] = []

    def recorder(package: str, signature: inspect.Signature) -> Any:
        return lambda *args, **kwargs: calls.append((package, signature.bind(*args, **kwargs).arguments))

    for package in (reference, fused):
        signature = inspect.signature(getattr(package, name))
        monkeypatch.setattr(package, name, recorder(package.__name__, signature))
    getattr(c2t_kernels, name)(*placed, **dict(list(given.items())[len(placed) :]))
    assert [package for package, _ in calls] == [f"c2t_kernels.{side}"]
    assert calls[0][1] == given


@pytest.mark.parametrize("name", DISPATCHED)
def test_the_reference_documents_both_sides(name: str):
    judge, operation = getattr(reference, name), getattr(c2t_kernels, name)
    assert operation.__name__ == name and operation.__doc__.startswith(judge.__doc__)
    more = [
        item.name for item in parameters(getattr(fused, name)) if item.name not in inspect.signature(judge).parameters
    ]
    assert all(word in operation.__doc__.rpartition("On a GPU:")[2] for word in more)


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
    users = {path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py") if triton_imports(path)}
    assert users == {"fused"}


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
import c2t_kernels.flashinfer_tree

print(c2t_kernels.draft_stats(torch.zeros(1, 4), 4).entropy.shape)
assert "triton" not in sys.modules
try:
    import c2t_kernels.fused
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_everything_but_the_kernels_works_without_triton():
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["torch.Size([1])", "triton"]
