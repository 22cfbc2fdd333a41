"""Which attention SGLang chooses for C2T's command lines, on machines that are not here."""

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

Chosen = dict[str, dict[str, dict[str, str]]]
# docs/sglang.md has the same table
CHAINS = {
    ("H100", "llama"): "fa3",
    ("H100", "qwen3"): "fa3",
    ("H100", "gpt_oss"): "fa3",
    ("H100", "deepseek"): "fa3",
    ("B200", "llama"): "trtllm_mha",
    ("B200", "qwen3"): "trtllm_mha",
    ("B200", "gpt_oss"): "trtllm_mha",
    ("B200", "deepseek"): "trtllm_mla",
    ("A100", "llama"): "flashinfer",
    ("A100", "qwen3"): "flashinfer",
    ("A100", "gpt_oss"): "triton",
    ("A100", "deepseek"): "triton",
}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Chosen:
    """SGLang keeps what it has resolved in globals, hence a process of its own."""
    folder = tmp_path_factory.mktemp("models")
    output = folder / "found.json"
    program = [sys.executable, SGLANG / "chooser_program.py", folder, output]
    subprocess.run(program, env=cpu_engine_env(os.environ), check=True, timeout=600)
    found: Chosen = json.loads(output.read_text())
    return found


@pytest.mark.parametrize(("machine", "model"), CHAINS)
def test_chains_are_verified_by_what_plain_decoding_has(chosen: Chosen, machine: str, model: str):
    assert chosen[machine][model]["chains"] == CHAINS[machine, model]
    assert chosen[machine][model]["plain"] == CHAINS[machine, model]


@pytest.mark.parametrize("machine", ["H100", "B200", "A100"])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_trees_are_verified_where_masks_are_taken(chosen: Chosen, machine: str, model: str):
    assert chosen[machine][model]["trees"] == "flashinfer"


@pytest.mark.parametrize(("model", "attention"), [("gpt_oss", "trtllm_mha"), ("deepseek", "trtllm_mla")])
def test_trees_where_masks_are_not_taken_are_refused_in_one_line(chosen: Chosen, model: str, attention: str):
    refused = chosen["B200"][model]["trees"]
    assert refused.startswith(f"SystemExit: C2T: --attention-backend is {attention}, which takes no trees: use one of")


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_without_a_top_k_written_early_a_b200_gets_another_one(chosen: Chosen, model: str):
    """Why C2T writes it before SGLang looks."""
    assert chosen["B200"][model]["unwritten"] == "flashinfer"


def test_larger_pages_do_not_cost_hopper_its_attention(chosen: Chosen):
    """There a top-k of 1 would, so none is written."""
    assert chosen["H100"]["llama"]["pages_of_16"] == "fa3"


@pytest.mark.parametrize(
    ("machine", "line", "others"),
    [
        ("H100", "triton_beside_fa3", "fa3"),
        ("H100", "trees_on_triton_beside_fa3", "fa3"),
        ("B200", "triton_beside_trtllm_mha", "trtllm_mha"),
    ],
)
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_another_backend_verifies_alone(chosen: Chosen, machine: str, model: str, line: str, others: str):
    """By the flags of docs/sglang.md."""
    assert chosen[machine][model][line] == f"triton, prefill {others}, draft {others}"


def test_without_the_mode_the_backend_of_prefill_verifies(chosen: Chosen):
    """Why the page gives it."""
    assert chosen["H100"]["llama"]["without_the_mode"].startswith("fa3, prefill fa3, ")


def test_trees_beside_trtllm_mha_are_refused(chosen: Chosen):
    refused = chosen["B200"]["llama"]["trees_on_triton_beside_trtllm_mha"]
    assert refused.startswith(
        "SystemExit: C2T: --prefill-attention-backend is trtllm_mha, which takes no trees: use one"
    )
