"""Both sides of every operation by its name, for tests that go through all of them."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import SimpleNamespace

import c2t_kernels

# each function's own package: c2t_kernels.<package>
PACKAGES = {
    name: getattr(c2t_kernels, name).__module__
    for name in c2t_kernels.__all__
    if inspect.isfunction(getattr(c2t_kernels, name))
}
OPERATIONS = tuple(sorted(PACKAGES))


def _side(module: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(import_module(f"{PACKAGES[name]}.{module}"), name) for name in OPERATIONS})


reference, fused = _side("reference"), _side("kernel")
