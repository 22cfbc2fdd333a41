"""SGLang's own backends under packed rows with sliding windows, sinks and caches of 8 bits, of latent keys too."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from tests.engines.sglang.verify.test_packed_backends import CASES, TOLERANCE  # noqa: E402
from tests.support.sglang.in_interpreter import found_by  # noqa: E402

WINDOWS = ("fa3_window", "fa3_window_pages_of_16", "trtllm_mha_window")
BYTES = ("fa3_fp8", "trtllm_mha_fp8")
LATENT = ("fa3_latent_fp8", "trtllm_mla_fp8", "cutedsl_mla_fp8", "flashinfer_mla_fp8", "flashmla_fp8")
WINDOW_FAULTS = ("a_window_of_every_key", "slots_of_all_layers", "sinks_left_out", "left_over_rows_to_the_last")
BYTES_FAULTS = ("scale_of_k_left_out", "scale_of_v_left_out", "lengths_of_another_step")
LATENT_FAULTS = ("lengths_of_another_step", "a_stale_page_table", "a_request_reads_slot_0")
PLANTED = [
    *((backend, fault) for backend in WINDOWS for fault in WINDOW_FAULTS),
    *((backend, fault) for backend in BYTES for fault in BYTES_FAULTS),
    *((backend, fault) for backend in LATENT for fault in LATENT_FAULTS),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    loaded: dict[str, Any] = found_by("packed_variants_program.py", tmp_path_factory.mktemp("variants"))
    assert tuple(loaded) == (*WINDOWS, *BYTES, *LATENT)
    assert {(name, each) for name in loaded for each in loaded[name]} == {
        *((name, case) for name in loaded for case in CASES),
        *PLANTED,
    }
    return loaded


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", [*WINDOWS, *BYTES, *LATENT])
def test_each_request_attends_to_its_own_rows(found: dict[str, dict[str, float]], backend: str, case: str):
    """Within the window and beside the sinks, or with the scales of the cache."""
    assert found[backend][case] < TOLERANCE


@pytest.mark.parametrize(("backend", "fault"), PLANTED)
def test_a_planted_fault_is_seen(found: dict[str, dict[str, float]], backend: str, fault: str):
    assert found[backend][fault] > 0.01


TRITON_CASES = ("chains", "chains_with_padding", "one_request", "roots_only")
TRITON_FAULTS = (
    *("a_window_of_every_key", "window_of_another_request", "sinks_left_out"),
    *("scale_of_k_left_out", "scale_of_v_left_out"),
)
# each weight is off by 2**-4 of itself at most, and values are up to 8
ROUNDED = 0.5


@pytest.fixture(scope="module")
def on_triton(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """SGLang's kernel, in Triton's interpreter."""
    loaded: dict[str, Any] = found_by("triton_variants_program.py", tmp_path_factory.mktemp("triton"))
    assert len(loaded) == 2 * (3 * len(TRITON_CASES) + 2 + len(TRITON_FAULTS) + 3)
    return loaded


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("case", TRITON_CASES)
@pytest.mark.parametrize(("variant", "bound"), [("window", TOLERANCE), ("fp8", ROUNDED), ("latent", TOLERANCE)])
def test_triton_attends_to_its_own_rows(on_triton: dict[str, float], variant: str, bound: float, case: str, how: str):
    assert on_triton[f"{variant}-{case}-{how}"] < bound


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_trees_on_triton_read_a_cache_of_8_bits(on_triton: dict[str, float], how: str):
    """Rounding hides what one bit of a mask does, but not a mask of another request."""
    assert on_triton[f"fp8-trees-{how}"] < ROUNDED
    assert on_triton[f"mask_offset_of_the_neighbour-{how}"] > 2 * ROUNDED


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_trees_on_triton_read_latent_keys(on_triton: dict[str, float], how: str):
    assert on_triton[f"latent-trees-{how}"] < TOLERANCE
    assert on_triton[f"mask_offset_of_the_neighbour_latent-{how}"] > 0.01
    assert on_triton[f"lengths_of_another_step-{how}"] > 0.01


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("fault", TRITON_FAULTS)
def test_a_planted_fault_on_triton_is_seen(on_triton: dict[str, float], fault: str, how: str):
    assert on_triton[f"{fault}-{how}"] > (2 * ROUNDED if "scale" in fault else 0.01)
