"""What a decoding step dispatches to a GPU beside its base algorithm's, and that it waits for nothing."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from tests.support.sglang.in_interpreter import found_by  # noqa: E402

# Each number has no slack: whoever takes an operation away writes the new one here.
OPERATIONS = {
    "sync": {"cut": 1, "pack and scatter": 4, "attention metadata": 1, "seeds": 2},
    "lagged": {"cut": 2, "pack and scatter": 3, "attention metadata": 1, "seeds": 2},
    # all that was drafted is verified: nothing to pack
    "planned": {"cut": 3, "pack and scatter": 0, "attention metadata": 1, "report": 1, "seeds": 2},
    "planned, cut": {"cut": 3, "pack and scatter": 3, "attention metadata": 1, "report": 1, "seeds": 2},
    "network": {"cut": 3, "pack and scatter": 0, "attention metadata": 1, "report": 1, "seeds": 2},
    "trees": {"cut": 4, "pack and scatter": 4, "attention metadata": 3, "seeds": 2},
    # whose draft is planned before
    "trees, planned": {"cut": 5, "pack and scatter": 3, "attention metadata": 3, "report": 1, "seeds": 2},
}
IN_GRAPHS = {
    "sync": {"draft graph": 18, "target graph, one layer": 0},
    "lagged": {"draft graph": 18, "target graph, one layer": 0},
    "planned": {"draft graph": 24, "target graph, one layer": 0},
    "planned, cut": {"draft graph": 24, "target graph, one layer": 0},
    # planned, and the classifier itself is learnt too
    "network": {"draft graph": 36, "target graph, one layer": 0},
    "trees": {"draft graph": 214, "target graph, one layer": 1},
    "trees, planned": {"draft graph": 214, "target graph, one layer": 1},
}
WAITS: dict[str, dict[str, dict[str, int]]] = {
    # the host counts the rows
    "sync": {"pack and scatter": {"__int__": 1}},
    "lagged": {},
    "planned": {},
    "planned, cut": {},
    "network": {},
    "trees": {"pack and scatter": {"__int__": 1}},
    "trees, planned": {},
}
WAITING = {
    "number": "__int__",
    "truth": "__bool__",
    "mask": "__getitem__",
    "list index": "__getitem__",
    "copy": "cpu",
    "copy by to": "to",
    "list": "tolist",
    "tensor of a list": "tensor",
    "event of this step": "event",
}
DISPATCHED = {"full": "full", "cast": "_to_copy", "copy without a wait": "copy over the bus", "number": "sum"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    loaded: dict[str, Any] = found_by("tests.support.sglang.operations_program", tmp_path_factory.mktemp("operations"))
    return loaded


def totals(parts: dict[str, Any], names: dict[str, int]) -> dict[str, int]:
    return {part: sum(parts[part]["operations"].values()) for part in names}


@pytest.mark.parametrize("mode", OPERATIONS)
def test_a_step_dispatches_no_more_than_it_is_known_to(found: dict[str, Any], mode: str):
    parts, expected = found["counts"][mode], OPERATIONS[mode] | IN_GRAPHS[mode]
    assert totals(parts, expected) == expected
    assert not any(parts[part]["operations"] for part in parts.keys() - expected.keys())


@pytest.mark.parametrize("mode", WAITS)
def test_a_step_waits_where_it_is_known_to(found: dict[str, Any], mode: str):
    waits = {part: of["waits"] for part, of in found["counts"][mode].items() if of["waits"]}
    assert waits == WAITS[mode]


def test_chains_whose_mask_nobody_reads_are_linked_by_one_kernel(found: dict[str, Any]):
    """Over a mask with columns of the prefix SGLang fills all of those, and makes links and slots one by one."""
    assert found["links"] == {"_build_chain_tree_kernel": 1}


def test_a_step_of_trees_makes_no_workspace(found: dict[str, Any]):
    """It made one of 97 KiB a row for each layer, and one for the seeds."""
    assert found["workspaces"] == 0


@pytest.mark.parametrize("fault", WAITING)
def test_a_wait_in_a_step_is_seen(found: dict[str, Any], fault: str):
    assert found["faults"][fault]["waits"] == {WAITING[fault]: 1}


@pytest.mark.parametrize("fault", DISPATCHED)
def test_an_operation_too_many_is_seen(found: dict[str, Any], fault: str):
    assert found["faults"][fault]["operations"] == {DISPATCHED[fault]: 1}


@pytest.mark.parametrize("free", ["view", "new memory"])
def test_what_dispatches_nothing_is_not_counted(found: dict[str, Any], free: str):
    assert found["faults"][free] == {"operations": {}, "waits": {}}
