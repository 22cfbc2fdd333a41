"""SGLang's FlashInfer backend on ragged verify forwards, with a stub for FlashInfer, against the reference."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from c2t_plugin.config import PACKINGS  # noqa: E402
from tests.support.sglang.in_interpreter import found_by  # noqa: E402

CASES = ("chains", "trees", "trees_larger_tier", "one_chain", "one_tree", "roots_only", "every_slot_and_row")
FAULTS = (
    *("mask_bit_off", "uniform_rows", "own_keys_left_out", "lengths_of_another_step", "left_over_rows_to_the_last"),
    *("a_request_reads_slot_0", "a_stale_page_table", "mask_offset_of_the_neighbour"),
)
# float32 sums of some tens of terms in another order
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("tests.support.sglang.flashinfer_program", tmp_path_factory.mktemp("flashinfer"))


@pytest.fixture(scope="module")
def found(ran: dict[str, Any]) -> dict[str, dict[str, float]]:
    return ran["attention"]


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("case", CASES)
def test_each_request_attends_to_its_own_rows(found: dict[str, dict[str, float]], case: str, how: str):
    """With NaN in all that no real row may read."""
    assert found[f"{case}-{how}"]["distance"] < TOLERANCE
    assert found[f"{case}-{how}"]["padding"] == 0.0
    assert len(found) == 2 * len(CASES) + 2 * len(FAULTS) + 3


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(found: dict[str, dict[str, float]], fault: str, how: str):
    assert found[f"{fault}-{how}"]["distance"] > 0.01


def test_graphs_of_chains_are_planned_by_what_the_host_knows(ran: dict[str, Any]):
    """But for where rows begin, which is read back; a tree's mask is packed by FlashInfer's own plan."""
    assert ran["planned_by"] == {"chains": "host", "trees": "device"}
    assert ran["attention"]["prefixes_of_another_step-graph"]["distance"] > 0.01


def test_of_chains_that_are_verified_whole_nothing_is_read_back(ran: dict[str, Any]):
    """Nor is it asked where rows begin, though this graph has slots without a request. Of cut ones it is."""
    assert ran["whole"]["distance"] < TOLERANCE and ran["whole"]["padding"] == 0.0
    assert ran["whole"]["read_back"] == 1.0


def test_each_tier_has_wrappers_of_its_own(found: dict[str, dict[str, float]]):
    assert found["wrappers_by_requests-graph"]["distance"] > 0.01


def test_sglangs_plan_for_one_width_is_kept_away(found: dict[str, dict[str, float]]):
    assert found["host_plan-graph"]["distance"] < TOLERANCE


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_padded_trees_attend_to_what_is_above_them(ran: dict[str, Any], how: str):
    """Of one width, as without `--speculative-c2t-packing flashinfer`."""
    assert ran["uniform"][f"padded-{how}"]["distance"] < TOLERANCE
    assert ran["uniform"][f"padded_bit_off-{how}"]["distance"] > 0.01


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("case", ["chains", "trees"])
def test_a_cache_of_8_bits_is_read_with_its_scales(ran: dict[str, Any], case: str, how: str):
    """FlashInfer applies them: the distance is that of sums."""
    assert ran["bytes"][f"{case}-{how}"] < 2 * TOLERANCE
    for name in "kv":
        assert ran["bytes"][f"scale_of_{name}_left_out-{case}-{how}"] > 0.01


def test_what_may_pack_rows_is_replaced_and_nothing_else(ran: dict[str, Any]):
    own = {"auto": ["triton", "flashinfer"], "triton": ["triton"], "flashinfer": ["flashinfer"]}
    assert ran["registry"]["replaced"] == {wanted: own.get(wanted, []) for wanted in PACKINGS}


def test_sglangs_backend_is_made_ragged_and_the_one_for_latent_keys_is_not(ran: dict[str, Any]):
    assert ran["registry"]["built"] == ["PackedFlashInferAttnBackend", "ForLatentKeys"]


def test_both_modes_have_their_backend_built(ran: dict[str, Any]):
    assert ran["registry"]["modes"] == dict.fromkeys(("chain", "tree"), "PackedFlashInferAttnBackend")
