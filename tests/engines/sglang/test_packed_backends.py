"""SGLang's own backends that verify packed rows, fa3 and TensorRT-LLM's, on float32 twins of their kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from benchmarks.cpu_engine import cpu_engine_env  # noqa: E402
from tests.support.places import SGLANG  # noqa: E402

BACKENDS = ("fa3", "fa3_pages_of_16", "fa3_latent", "trtllm_mha", "trtllm_mla")
CASES = ("pad_slots", "whole", "spare_rows", "one_request", "eager", "eager_of_all")
FAULTS = ("left_over_rows_to_the_last", "a_stale_page_table", "lengths_of_another_step", "a_request_reads_slot_0")
# float32 sums of some tens of terms in another order
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Triton reads the variable when a kernel is imported, hence a process of its own."""
    output = tmp_path_factory.mktemp("packed") / "found.json"
    env = cpu_engine_env({**os.environ, "TRITON_INTERPRET": "1"})
    subprocess.run([sys.executable, SGLANG / "packed_program.py", output], env=env, check=True, timeout=600)
    loaded: dict[str, dict[str, float]] = json.loads(output.read_text())
    assert tuple(loaded) == BACKENDS and all(tuple(each) == (*CASES, *FAULTS) for each in loaded.values())
    return loaded


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_request_attends_to_its_own_rows(found: dict[str, dict[str, float]], backend: str, case: str):
    """With NaN in every key that the pass does not write."""
    assert found[backend][case] < TOLERANCE


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_planted_fault_is_seen(found: dict[str, dict[str, float]], backend: str, fault: str):
    if (backend, fault) == ("trtllm_mla", "left_over_rows_to_the_last"):
        pytest.skip("SGLang caps a request's rows at the window there, and drops the others")
    assert found[backend][fault] > 0.01
