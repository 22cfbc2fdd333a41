"""The standing GPU run calls the kernels as they want to be called: every part's small cases, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.part import PARTS, measure_case

# lanes behind the end of a row hold -inf, of which numpy warns where the interpreter computes what is then masked out
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning:triton")


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.slow] * (part == "table5")) for part in PARTS])
def test_our_kernels_pass_the_checks_of_the_gpu_run(part: str, device: str):
    cases = list(PARTS[part](torch.device(device), True))
    assert cases
    for case in cases[:2]:
        ours = tuple(each for each in case.providers if each.name.startswith("fused"))
        rows = list(measure_case(part, replace(case, providers=ours), {}, None))
        assert rows and all(row.fault == "" for row in rows), rows
