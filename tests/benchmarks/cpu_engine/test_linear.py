"""Products with packed weights: those of F.linear, of the weights as they are now."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from benchmarks.cpu_engine.site.c2t_cpu_engine import patches


@pytest.fixture
def packed(sgl_kernel: ModuleType) -> Any:
    return torch.ops.sgl_kernel.weight_packed_linear


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product(packed: Any, rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(576, 640), torch.randn(576) if biased else None
    given = torch.randn(rows, 640)
    torch.testing.assert_close(packed(given, weight, bias, True), linear(given, weight, bias), rtol=1e-4, atol=1e-3)


def test_a_weight_that_changes_is_packed_anew(packed: Any) -> None:
    weight, given = torch.randn(512, 512), torch.randn(3, 512)
    first = packed(given, weight, None, True)
    weight.mul_(2.0)
    torch.testing.assert_close(packed(given, weight, None, True), 2.0 * first, rtol=1e-4, atol=1e-3)


def test_a_weight_in_the_place_of_another_is_packed_anew(packed: Any) -> None:
    """One that is freed leaves its address and its id to the next."""
    given, places = torch.randn(3, 512), set()
    for seed in range(8):
        weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(seed))
        places.add((weight.data_ptr(), id(weight)))
        torch.testing.assert_close(packed(given, weight, None, True), linear(given, weight), rtol=1e-4, atol=1e-3)
        del weight
    assert len(places) < 8, "nothing came back"


def test_wide_weights_alone_are_packed_once_they_are_loaded(sgl_kernel: ModuleType) -> None:
    wide = importlib.import_module("sgl_kernel.linear").wide
    loaded: list[object] = []
    method = patches._packing(lambda self, layer: loaded.append(layer), wide)
    assert patches._packing(method, wide) is method
    weights = [torch.empty(512, 600), torch.empty(600, 512), torch.empty(511, 600), torch.empty(600)]
    layers = [SimpleNamespace(weight=each) for each in (*weights, torch.empty(600, 512, dtype=torch.bfloat16))]
    for layer in layers:
        method(None, layer)
    assert loaded == layers
    marked = [getattr(layer, "use_intel_amx_backend", False) for layer in layers]
    assert marked == [True, True, False, False, False]
