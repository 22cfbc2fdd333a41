"""SGLang's own backends that verify packed rows, fa3 and TensorRT-LLM's, on float32 twins of their kernels."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from tests.support.sglang.in_interpreter import found_by  # noqa: E402

# SGLang gives no request more rows there: it drops them, or they are nobody's
WINDOWED = ("trtllm_mla", "cutedsl_mla", "flashinfer_mla", "flashinfer_mla_pages_of_16", "flashmla")
BY_LENGTH = ("fa3", "fa3_pages_of_16", "fa3_latent", "fa3_latent_pages_of_64", "trtllm_mha")
BACKENDS = (*BY_LENGTH, *WINDOWED)
CASES = ("pad_slots", "whole", "spare_rows", "one_request", "eager", "eager_of_all")
FAULTS = ("left_over_rows_to_the_last", "a_stale_page_table", "lengths_of_another_step", "a_request_reads_slot_0")
TREE_BENCHES = ("pages_of_1", "pages_of_4", "latent", "fp8")
TREES = ("pad_slots", "whole", "spare_rows", "roots_only", "one_request", "eager", "eager_of_all")
TREE_FAULTS = (
    *("mask_offset_of_the_neighbour", "nodes_of_the_row_above", "a_stale_page_table", "lengths_of_another_step"),
    *("a_request_reads_slot_0", "left_over_rows_to_the_last"),
    *("mask_offset_of_the_neighbour_eager", "lengths_of_another_step_eager"),
)
# float32 sums of some tens of terms in another order
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, float]]]:
    loaded: dict[str, dict[str, dict[str, float]]] = found_by("packed_program.py", tmp_path_factory.mktemp("packed"))
    return loaded


@pytest.fixture(scope="module")
def found(ran: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    loaded = ran["rows"]
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
    if fault == "left_over_rows_to_the_last" and backend in WINDOWED:
        pytest.skip("SGLang gives no request more rows there")
    assert found[backend][fault] > 0.01


@pytest.mark.parametrize("case", ["whole_windows", "a_row_of_each", "whole_windows_again"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_is_replayed_with_other_rows_of_each_request_than_it_was_captured_with(
    ran: dict[str, dict[str, dict[str, float]]], backend: str, case: str
):
    """SGLang 34384. That its layout has as many requests and rows as at capture is looked at where it is replayed."""
    assert ran["slots"][backend][case] < TOLERANCE


@pytest.mark.parametrize("backend", BY_LENGTH)
def test_a_kernel_that_takes_the_captured_number_of_rows_is_seen(
    ran: dict[str, dict[str, dict[str, float]]], backend: str
):
    assert ran["slots"][backend]["rows_of_the_capture"] > 0.01


@pytest.fixture(scope="module")
def trees_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    loaded: dict[str, Any] = found_by("packed_trees_program.py", tmp_path_factory.mktemp("trees"))
    return loaded


@pytest.fixture(scope="module")
def trees(trees_run: dict[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    loaded: dict[str, dict[str, tuple[float, float]]] = trees_run["found"]
    assert tuple(loaded) == TREE_BENCHES and all(tuple(each) == (*TREES, *TREE_FAULTS) for each in loaded.values())
    return loaded


def test_fa3_is_ours_for_trees_alone(trees_run: dict[str, Any]):
    """And where its metadata is what we fill."""
    ours = ("trees", "latent", "fp8_checkpoint", "fp8_cache", "fp8_cache_and_checkpoint")
    stock = ("chains", "trees_off", "top_k_of_1", "latent_pages", "sliding", "fa4", "fp8_with_scales")
    assert trees_run["built"] == {
        **dict.fromkeys(ours, "PackedFa3Backend"),
        **dict.fromkeys(stock, "FlashAttentionBackend"),
    }


@pytest.mark.parametrize("case", TREES)
@pytest.mark.parametrize("bench", TREE_BENCHES)
def test_each_node_of_fa3_attends_to_its_own_ancestors(trees: dict[str, Any], bench: str, case: str):
    """With NaN in every key that is no node's of the pass and behind no prefix; rows of nobody are 0."""
    distance, padding = trees[bench][case]
    assert distance < TOLERANCE
    assert padding == 0.0


@pytest.mark.parametrize("fault", TREE_FAULTS)
@pytest.mark.parametrize("bench", TREE_BENCHES)
def test_a_planted_fault_of_trees_is_seen(trees: dict[str, Any], bench: str, fault: str):
    assert trees[bench][fault][0] > 0.01
