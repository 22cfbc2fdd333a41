"""Files of a pair directory that are not what they should be: one line of ours for each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.pair_files import load_prompts, read_weights
from c2t_plugin.lab.pairs import load_pair
from c2t_plugin.lab.texts import held_out_paths


@pytest.fixture
def pair(tiny_pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pair, tmp_path / "pair"))


CONFIGS: dict[str, tuple[Any, str]] = {
    "a list": ([], "does not say architectures"),
    "architectures that are a name": ({"architectures": "Llama", "vocab_size": 3}, "does not say architectures"),
    "no architectures": ({"vocab_size": 3}, "does not say architectures"),
    "no size": ({"architectures": ["LlamaForCausalLM"]}, "does not say architectures"),
    "a size that is a text": ({"architectures": ["LlamaForCausalLM"], "vocab_size": "3"}, "does not say architectures"),
    "another size too": (
        {"architectures": ["LlamaForCausalLM"], "vocab_size": 3, "draft_vocab_size": -1},
        "does not say architectures",
    ),
}


@pytest.mark.parametrize("which", ["target", "eagle3"])
@pytest.mark.parametrize(("config", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_says_nothing_is_one_line(pair: Path, which: str, config: Any, message: str) -> None:
    (pair / which / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(C2TError, match=message):
        load_pair(pair, "eagle3")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "1" * 5_000], ids=["cut", "deep", "digits"])
def test_a_config_that_is_no_json_is_one_line(pair: Path, text: str) -> None:
    (pair / "eagle3" / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(C2TError, match="not valid JSON") as error:
        load_pair(pair, "eagle3")
    assert "\n" not in str(error.value)


def test_weights_that_are_none_are_one_line(pair: Path) -> None:
    (pair / "eagle3" / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(C2TError, match="not a readable safetensors file"):
        read_weights(pair / "eagle3")


@pytest.mark.parametrize("text", ["[]", "{}", '{"prompts": 3}'])
def test_prompts_that_are_none_are_one_line(pair: Path, text: str) -> None:
    (pair / "held_out_prompts.json").write_text(text, encoding="utf-8")
    with pytest.raises(C2TError, match="no list of prompts"):
        load_prompts(pair)


PROMPTS = {
    "a prompt that is none": [3],
    "no file": [{"ids": [1, 2]}],
    "ids that are text": [{"file": "a", "ids": ["1"]}],
    "no ids": [{"file": "a", "ids": []}],
    "ids below 0": [{"file": "a", "ids": [-1]}],
}


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
def test_prompts_of_another_kind_are_one_line(pair: Path, prompts: Any) -> None:
    (pair / "held_out_prompts.json").write_text(json.dumps({"prompts": prompts}), encoding="utf-8")
    with pytest.raises(C2TError, match="no list of prompts"):
        load_prompts(pair)


@pytest.mark.parametrize("text", ["{}", "[3]", "[" * 100_000, "1" * 5_000], ids=["object", "number", "deep", "digits"])
def test_held_out_files_that_are_none_are_one_line(pair: Path, text: str) -> None:
    (pair / "held_out_files.json").write_text(text, encoding="utf-8")
    with pytest.raises(C2TError, match=r"is no list of files|not valid JSON"):
        held_out_paths(pair)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff"])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_tokenizer_that_is_none_is_one_line(pair: Path, which: str, content: bytes) -> None:
    (pair / which / "tokenizer.json").write_bytes(content)
    with pytest.raises(C2TError, match="is no tokenizer that can be read") as error:
        load_pair(pair, "draft")
    assert "\n" not in str(error.value)


HEADS = {
    "a size of text": {"intermediate_size": "many"},
    "more weights than there are": {"intermediate_size": 10**9},
    "layers that are not there": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 99]}},
    "layers of text": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1"]}},
    "no object of layers": {"eagle_config": 3},
    "heads of none": {"num_attention_heads": 0},
}


@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)
def test_a_head_that_cannot_be_is_one_line(pair: Path, changes: dict[str, Any]) -> None:
    path = pair / "eagle3" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}), encoding="utf-8")
    with pytest.raises(C2TError, match="is not an eagle3 head of the layout that is read here") as error:
        load_pair(pair, "eagle3")
    assert "\n" not in str(error.value)


def test_a_target_that_cannot_be_is_one_line(pair: Path) -> None:
    path = pair / "target" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": "x"}), encoding="utf-8")
    with pytest.raises(C2TError, match="is not a causal LM that transformers can load") as error:
        load_pair(pair, "eagle3")
    assert "\n" not in str(error.value)
