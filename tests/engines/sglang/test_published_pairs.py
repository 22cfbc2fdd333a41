"""Well-known pairs by their published configurations: they start and answer with C2T, on dummy weights.

Vocabularies, the ratio of heads, norms and rotary scaling are the published ones. Depth is two layers, and widths are a
sixteenth of the published ones, so that it takes seconds; PUBLISHED_WIDTH=full takes them as they are, with fewer
tokens. An EAGLE-3 head reads three layers of its target; of two layers it reads what goes into each. Llama's head says
2,048 positions, of the target's 131,072, so SGLang starts the pair with a variable only, as docs/sglang.md sets it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402

D_MAX = 4
FULL = os.environ.get("PUBLISHED_WIDTH") == "full"
NEW_TOKENS = 6 if FULL else 24

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
# What the public heads say: one layer of Llama's kind, over 32,000 of the target's words.
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
LLAMA_HEAD = {**HEAD, "max_position_embeddings": 2048}
PAIRS = {
    "llama-3.1-8b-instruct": (LLAMA_31_8B, {**LLAMA_31_8B, **LLAMA_HEAD, "draft_vocab_size": 32000}),
    "qwen3-8b": (QWEN3_8B, {**QWEN3_8B, **HEAD, "draft_vocab_size": 32000}),
}
WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
OVERRIDES = {
    "num_hidden_layers": 2,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0]},
    **({} if FULL else WIDTHS),
}


@pytest.fixture(scope="module", params=list(PAIRS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("published")
    for name, config in zip(("target", "draft"), PAIRS[request.param], strict=True):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    flags = [
        *("--speculative-algorithm", "C2T", "--speculative-draft-model-path", str(folder / "draft")),
        *("--speculative-num-steps", str(D_MAX), "--speculative-c2t-beta", "0.05"),
        *("--load-format", "dummy", "--json-model-override-args", json.dumps(OVERRIDES)),
        *("--skip-tokenizer-init", "--disable-radix-cache"),
    ]
    env = {**os.environ, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with CpuServer(folder / "target", *flags, log=folder / "server.log", env=env) as server:
        target, draft = PAIRS[request.param]
        yield SimpleNamespace(server=server, vocab=target["vocab_size"], target=target, draft=draft, log=server.log)


def answers(served: SimpleNamespace, options: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    prompts = [[served.vocab - 1 - 31 * i - 7 * j for j in range(20 + i)] for i in range(4)]
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    if options is not None:
        params["custom_params"] = {"c2t": options}
    return served.server.request("/generate", {"input_ids": prompts, "sampling_params": params})


def test_it_answers_what_plain_decoding_does(served: SimpleNamespace):
    found, plain = answers(served), answers(served, {"max_depth": 0})
    assert [each["output_ids"] for each in found] == [each["output_ids"] for each in plain]
    assert all(len(each["output_ids"]) == NEW_TOKENS for each in found)
    assert {each["meta_info"]["spec_cap_length"] for each in plain} == {1.0}
    static = answers(served, {"enabled": False})
    assert [each["output_ids"] for each in static] == [each["output_ids"] for each in plain]
    assert {each["meta_info"]["spec_cap_length"] for each in static} == {1.0 + D_MAX}


def test_the_base_is_found_and_every_confidence_is_finite(served: SimpleNamespace):
    answers(served)
    state = served.server.request("/get_server_info")["internal_states"][0]["c2t"]
    assert state["configuration"]["base"] == "EAGLE3"
    assert state["configuration"]["classifier_origin"].startswith("shipped")
    assert state["non_finite"] == 0
    assert sum(state["verified"]) > 0
    assert "this classifier was fitted on another pair" in served.log.read_text(errors="replace")


def test_the_draft_has_the_context_length_of_its_target(served: SimpleNamespace):
    """Where the head says less, SGLang overrides that, as the variable lets it, and says so."""
    positions, own = (each["max_position_embeddings"] for each in (served.target, served.draft))
    overridden = f"Overriding the draft model's max_position_embeddings to {positions}." in served.log.read_text(
        errors="replace"
    )
    assert overridden is (own < positions)
