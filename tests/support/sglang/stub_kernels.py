"""Fixtures for tests of the SGLang adapter and the CPU engine."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from benchmarks.cpu_engine import SITE


@pytest.fixture(scope="session")
def sgl_kernel() -> ModuleType:
    """The stub for sgl_kernel, imported into this process without staying on sys.path."""
    if torch.cuda.is_available():
        pytest.skip("the stub refuses to load where CUDA is available")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        patch.syspath_prepend(str(SITE))
        module = importlib.import_module("sgl_kernel")
        importlib.import_module("sgl_kernel.speculative")
    assert str(SITE) not in sys.path
    return module
