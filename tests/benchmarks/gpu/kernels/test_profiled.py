"""The kernels that a breakdown looks for in a captured graph are those that there are, by their names."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.serving.spans import KERNELS, phase_of

FOUND = [
    ("statistics", "stats.scan", "scan_kernel"),
    ("statistics", "stats.kernel", "select_kernel"),
    ("classifier", "score.kernel", "score_chain_kernel"),
    ("classifier", "stop.kernel", "early_stop_kernel"),
    ("rerank", "growth.kernel", "grow_layer_kernel"),
]


@pytest.mark.parametrize(("phase", "module", "attribute"), FOUND)
def test_a_kernel_is_called_what_the_breakdown_looks_for(phase: str, module: str, attribute: str):
    kernel = getattr(importlib.import_module(f"c2t_kernels.{module}"), attribute)
    # an interpreted kernel has no name of its own
    assert phase_of(KERNELS, getattr(kernel, "fn", kernel).__name__) == phase


def test_every_kernel_looked_for_is_checked_here():
    names = {name for _, pattern in KERNELS for name in pattern.pattern.strip("^(?:)").split("|")}
    assert names == {name for _, _, name in FOUND}
