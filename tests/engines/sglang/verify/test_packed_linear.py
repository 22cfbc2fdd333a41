"""SGLang's linear layers (KDA) under packed rows, on twins of their kernels: outputs, and states that are accepted."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from tests.engines.sglang.verify.test_packed_backends import TOLERANCE  # noqa: E402
from tests.support.sglang.in_interpreter import found_by  # noqa: E402

CASES = ("pad_slots", "whole", "spare_rows", "one_request", "eager")
FAULTS = ("lengths_of_another_step", "lengths_are_those_of_the_capture", "the_state_of_the_neighbour")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    loaded: dict[str, Any] = found_by("kda_program.py", tmp_path_factory.mktemp("kda"))
    assert tuple(loaded) == (*CASES, *FAULTS)
    return loaded


@pytest.mark.parametrize("case", CASES)
def test_each_request_goes_on_from_its_own_state(found: dict[str, float], case: str):
    assert found[case] < TOLERANCE


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(found: dict[str, float], fault: str):
    assert found[fault] > 0.01
