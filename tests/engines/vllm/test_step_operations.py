"""What a decoding step dispatches for C2T on vLLM, however many requests share it, and where it waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS = (1, 4)
# Each number has no slack: whoever takes an operation away writes the new one here.
OPERATIONS: dict[str, dict[str, int]] = {
    # all of it is numpy's
    "V1 on a CPU": {},
    "V1": {"draft steps": 20, "early end": 10, "cut": 1},
    "V2": {"draft graph": 18, "cut": 1, "report": 2},
    "V2 without graphs": {"draft steps": 18, "early end": 10, "cut": 1, "report": 2},
    "V2 adaptive": {"draft graph": 18, "report": 4},
    "V2 planned": {"draft graph": 18, "cut": 2, "report": 2},
}
# A synchronous scheduler takes lists. Drafts that end on their way wait for nothing.
WAITS: dict[str, dict[str, dict[str, int]]] = {
    "V1 on a CPU": {},
    "V1": {"cut": {"tolist": 2}},
    "V2": {"cut": {"tolist": 1}},
    "V2 without graphs": {"cut": {"tolist": 1}},
    "V2 adaptive": {},
    # the others ask for what the first has waited for
    "V2 planned": {"cut": {"tolist": 3}},
}


@pytest.fixture(scope="module")
def found(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Triton reads the variable when a kernel is imported, hence a process of its own."""
    output = tmp_path_factory.mktemp("operations") / "found.json"
    program = [sys.executable, "-m", "tests.support.vllm.operations_program", str(output), *map(str, REQUESTS)]
    subprocess.run(program, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=root, check=True, timeout=600)
    loaded: dict[str, Any] = json.loads(output.read_text())
    return loaded


def operations(parts: dict[str, Any]) -> dict[str, int]:
    totals = {part: sum(of["operations"].values()) for part, of in parts.items()}
    return {part: total for part, total in totals.items() if total}


def waits(parts: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {part: of["waits"] for part, of in parts.items() if of["waits"]}


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("mode", OPERATIONS)
def test_a_step_dispatches_no_more_than_it_is_known_to(found: dict[str, Any], mode: str, requests: int):
    assert operations(found["counts"][str(requests)][mode]) == OPERATIONS[mode]


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("mode", WAITS)
def test_a_step_waits_where_it_is_known_to(found: dict[str, Any], mode: str, requests: int):
    assert waits(found["counts"][str(requests)][mode]) == WAITS[mode]


def test_every_mode_is_held(found: dict[str, Any]):
    assert set(found["counts"]["4"]) == set(OPERATIONS) == set(WAITS)


@pytest.mark.parametrize("requests", REQUESTS)
def test_a_wait_and_an_operation_for_each_request_are_seen(found: dict[str, Any], requests: int):
    faulty = found["faulty"][str(requests)]
    assert waits(faulty)["cut"] == {**WAITS["V2"]["cut"], "__int__": 1}
    assert operations(faulty)["cut"] == OPERATIONS["V2"]["cut"] + requests
