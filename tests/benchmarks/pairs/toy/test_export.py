"""What the pair's `export` writes: the same models again, in directories that engines and the lab read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from benchmarks.pairs.toy import held_out_prompts, load
from benchmarks.pairs.toy.cli import EXPORTS, main
from benchmarks.pairs.toy.export import MTP_PREFIX, export, write_mimo
from benchmarks.pairs.toy.models import new_draft, new_head, new_target
from benchmarks.pairs.toy.recipe import Recipe
from benchmarks.pairs.toy.tokenizer import train_tokenizer
from c2t_plugin.classifier import FILE_NAME
from c2t_plugin.errors import C2TError

SMALL = Recipe(
    vocab_size=320, hidden=128, intermediate=96, draft_hidden=64, draft_intermediate=64, small_hidden=64, small_layers=2
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    target = new_target(SMALL)
    modules = {
        "target": target,
        "small_target": new_target(SMALL, "small_target"),
        "draft": new_draft(SMALL, target),
        "mtp": new_head("mtp", SMALL, target),
    }
    tokenizer = train_tokenizer(["def f(x): return x\n"] * 3, SMALL.vocab_size)
    for kind, module in modules.items():
        load.save_checkpoint(kind, module, SMALL, tokenizer, directory / kind)
    prompts = [{"file": "a.py", "text": "", "ids": list(range(64))}]
    (directory / "held_out_prompts.json").write_text(json.dumps({"prompts": prompts}), encoding="utf-8")
    (directory / "held_out_files.json").write_text("[]", encoding="utf-8")
    for kind in ("draft", "mtp"):
        (directory / kind / FILE_NAME).write_text(kind, encoding="utf-8")
    return directory


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(1, 41)[None]).logits


def test_the_target_in_a_mimo_checkpoint_has_the_pairs_logits(pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "mimo"
    assert main(["export", "mimo", "--pair", str(pair), "--out", str(out)]) == 0
    served, info = Qwen2ForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(name.startswith(MTP_PREFIX) for name in info["unexpected_keys"])
    # the added zeros change no bit
    assert torch.equal(logits(served), logits(load.load_llama("target", SMALL, pair)))


def test_the_head_in_a_mimo_checkpoint_is_the_pairs(pair: Path, tmp_path: Path) -> None:
    export(write_mimo, pair, tmp_path / "mimo")
    with safe_open(tmp_path / "mimo" / "model.safetensors", "pt") as file:
        found = {name.removeprefix(MTP_PREFIX): file.get_tensor(name) for name in file.keys() if MTP_PREFIX in name}  # noqa: SIM118
    biases = {name for name in found if name.endswith("bias")}
    assert biases == {f"self_attn.{part}_proj.bias" for part in "qkv"}
    assert not any(found[name].any() for name in biases)
    head = load.read_weights(pair / "mtp")
    assert found.keys() - biases == head.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in head.items())
    config = json.loads((tmp_path / "mimo" / "config.json").read_text(encoding="utf-8"))
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["MiMoForCausalLM"], 1)
    # the engines would load it with the weights
    assert not list((tmp_path / "mimo").glob("c2t_classifier*"))


def test_a_small_pair_is_a_pair_directory(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "small"
    assert main(["export", "small-pair", "--pair", str(pair), "--out", str(out)]) == 0
    target = LlamaForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    assert torch.equal(logits(target), logits(load.load_llama("small_target", SMALL, pair)))
    assert load.read_weights(out / "draft").keys() == load.read_weights(pair / "draft").keys()
    # it was fitted over the other target
    assert not list(out.rglob("c2t_classifier*"))
    monkeypatch.setenv("C2T_PAIR", str(out))
    assert held_out_prompts(1) == [list(range(64))]


@pytest.mark.parametrize("kind", EXPORTS)
def test_a_directory_in_use_stays_as_it_is(kind: str, pair: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(C2TError, match="not an empty directory"):
        main(["export", kind, "--pair", str(pair), "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_nothing_is_left_of_an_export_that_failed(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(C2TError, match=r"target/model\.safetensors is missing"):
        export(write_mimo, tmp_path / "no-pair", tmp_path / "out")

    def half(pair: Path, out: Path) -> None:
        write_mimo(pair, out)
        raise C2TError("stop")

    with pytest.raises(C2TError, match="stop"):
        export(half, pair, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_empty_directory_is_filled(pair: Path, tmp_path: Path) -> None:
    export(write_mimo, pair, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
