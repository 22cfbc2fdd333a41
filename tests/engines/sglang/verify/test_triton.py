"""The Triton attention backends on ragged verify forwards, in Triton's interpreter, against c2t_kernels' reference."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from tests.support.sglang.in_interpreter import found_by  # noqa: E402

FAULTS = (
    *("mask_bit", "prefix", "mask_begins", "lengths_of_another_step", "left_over_rows_to_the_last"),
    *("a_request_reads_slot_0", "a_stale_page_table", "mask_offset_of_the_neighbour"),
    "a_mask_that_nobody_filled",
)
CASES = (
    "chains",
    "chains_with_padding",
    "one_request",
    "roots_only",
    "the_whole_window",
    "trees",
    "trees_with_padding",
    "chains_of_pages",
    "trees_of_pages",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return found_by("triton_program.py", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ["stock", "tree"])
def test_each_request_attends_to_its_own_rows(found: dict[str, dict[str, float]], kernel: str, case: str, how: str):
    """With NaN in all that no real row may read."""
    # float32 sums of some tens of terms in another order
    assert found[f"{kernel}-{case}-{how}"]["distance"] < 5e-6
    assert found[f"{kernel}-{case}-{how}"]["padding"] == 0.0
    assert len(found) == 4 * len(CASES + FAULTS)


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", ["stock", "tree"])
def test_fault_is_caught(found: dict[str, dict[str, float]], kernel: str, fault: str, how: str):
    assert found[f"{kernel}-{fault}-{how}"]["distance"] > 1e-3
