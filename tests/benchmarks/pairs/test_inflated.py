"""Cost-padded targets and drafts: the small model's function in every part, written shard by shard or not at all.

Longer than 300 lines because its tests share the padded checkpoints, which take time to write.
"""

from __future__ import annotations

import json
import math
import shutil
import weakref
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.pairs.inflated import command as module
from benchmarks.pairs.inflated.command import KINDS, PRESETS, inflate, main
from benchmarks.pairs.inflated.weights import Inflation, Shape, Weight
from benchmarks.pairs.toy import held_out_prompts, pair_dir
from benchmarks.pairs.toy.load import load_llama, load_recipe
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.checkpoints import find_classifier
from c2t_plugin.engines.sglang.checkpoints import detect_base
from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.heads import hidden_states
from tests.support.core.head_by_hand import Head, two_steps, weights_in

pytestmark = pytest.mark.slow

TINY = PRESETS["tiny"]
SHARD_BYTES = 8 << 20
VOCAB = 4096
# Other orders of sums and a few roundings more, five layers deep, in float32: some units in the last place of logits up
# to 15
LOGIT_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("inflated")
    for kind in KINDS:
        inflate(kind, TINY, pair_dir(), out, dtype=torch.float32, shard_bytes=SHARD_BYTES)
    return out


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.tensor([prompt[:64] for prompt in held_out_prompts(6)])


def small_llama(kind: str) -> LlamaForCausalLM:
    return load_llama(kind, load_recipe(pair_dir()), pair_dir())


def big_llama(directory: Path) -> LlamaForCausalLM:
    model, report = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@torch.no_grad()
def difference(small: Tensor, big: Tensor) -> float:
    return float((big[..., : small.shape[-1]] - small).abs().max())


@pytest.mark.parametrize("kind", ["target", "draft"])
@torch.no_grad()
def test_logits_are_the_small_models_and_other_tokens_have_no_chance(kind: str, big: Path, tokens: Tensor):
    small, found = small_llama(kind)(tokens).logits, big_llama(big / kind)(tokens).logits
    assert small.std() > 1 and difference(small, found) < LOGIT_TOLERANCE
    assert torch.equal(found.argmax(-1), small.argmax(-1))
    assert found.softmax(-1)[..., VOCAB:].sum(-1).max() < 1e-6


def test_greedy_text_is_the_small_models(big: Path, tokens: Tensor):
    def written(model: LlamaForCausalLM) -> Tensor:
        return model.generate(tokens, max_new_tokens=24, do_sample=False, eos_token_id=None)

    assert torch.equal(written(big_llama(big / "target")), written(small_llama("target")))


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_heads_draft_what_the_small_ones_draft(kind: str, big: Path, tokens: Tensor):
    mine = two_steps(kind, big, big_llama(big / "target"), tokens)
    theirs = two_steps(kind, pair_dir(), small_llama("target"), tokens)
    for found, expected in zip(mine, theirs, strict=True):
        assert found.shape[-1] == (TINY.draft_vocab if kind == "eagle3" else TINY.target.vocab)
        assert expected.std() > 1 and difference(expected, found) < LOGIT_TOLERANCE
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        assert found.softmax(-1)[..., VOCAB:].sum(-1).max() < 1e-6


def test_the_heads_of_this_test_are_the_pairs(tokens: Tensor):
    """The judge above against the heads that were trained."""
    from benchmarks.pairs.toy.load import load_head
    from c2t_plugin.lab.heads import head_features

    target = small_llama("target")
    for kind in ("eagle3", "eagle1"):
        head = load_head(kind, load_recipe(pair_dir()), target, pair_dir())
        embedding = target.get_input_embeddings().weight
        states = head.unroll(embedding, tokens, head_features(head, hidden_states(target, tokens)), 1)[0]
        # the trained head reads the token after each position
        found = Head(pair_dir() / kind)(
            F.embedding(tokens.roll(-1, dims=1), embedding), head_features(head, hidden_states(target, tokens))
        )
        torch.testing.assert_close(found, states, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("attribute", "value"), [("constant", 0.0), ("constant", 0.2), ("ratio", 1)])
def test_a_wrong_constant_or_head_size_would_be_seen(
    attribute: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: Tensor
):
    """Planted faults: the small epsilon missing or too large, rotary pairs of wrong frequencies."""
    built = Inflation.__init__

    def broken(self: Inflation, *arguments: Any) -> None:
        built(self, *arguments)
        setattr(self, attribute, value)

    monkeypatch.setattr(Inflation, "__init__", broken)
    source = tmp_path / "pair"
    shutil.copytree(pair_dir() / "target", source / "target")
    inflate("target", TINY, source, tmp_path, dtype=torch.float32)
    small, found = small_llama("target")(tokens).logits, big_llama(tmp_path / "target")(tokens).logits
    assert difference(small, found) > 3 * LOGIT_TOLERANCE


def test_shards_are_complete_and_small(big: Path):
    index = json.loads((big / "target" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert sorted(path.name for path in (big / "target").glob("model-*.safetensors")) == files
    total = 0
    for file in files:
        with safe_open(big / "target" / file, "pt") as shard:
            assert {name for name, place in index["weight_map"].items() if place == file} == set(shard.keys())
            sizes = [shard.get_tensor(name).nbytes for name in shard.keys()]  # noqa: SIM118
        assert sum(sizes) <= SHARD_BYTES or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total


def test_no_more_than_a_shard_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    make = Weight.make

    def counted(self: Weight, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        nonlocal most
        tensor = make(self, dtype, generator)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(each().nbytes for each in alive if each() is not None))
        return tensor

    monkeypatch.setattr(Weight, "make", counted)
    limit = 4 << 20
    inflate("target", TINY, pair_dir(), tmp_path, shard_bytes=limit)
    assert 1 << 20 < most <= limit < sum(path.stat().st_size for path in tmp_path.glob("target/*.safetensors")) / 5


def test_a_seed_gives_the_same_weights_and_idle_parts_are_not_zero(tmp_path: Path, big: Path):
    inflate("eagle3", TINY, pair_dir(), tmp_path, dtype=torch.float32, shard_bytes=1 << 30)
    first, again = weights_in(big / "eagle3"), weights_in(tmp_path / "eagle3")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    idle = weights_in(big / "target")["model.layers.5.self_attn.q_proj.weight"]
    assert idle.std() == pytest.approx(0.02, rel=0.05)
    unread = first["midlayer.mlp.gate_proj.weight"][:, 256:]
    assert unread.std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(("kind", "norm"), [("target", "model.norm"), ("draft", "model.norm"), ("eagle3", "norm")])
def test_zeros_are_only_where_something_would_be_written(kind: str, norm: str, big: Path):
    """The LM head is random for known and other tokens alike where the final norm leaves nothing to multiply."""
    weights = weights_in(big / kind)
    silent = weights[f"{norm}.weight"] == 0
    assert silent.any()
    for rows in weights["lm_head.weight"].split(VOCAB):
        assert rows[:, silent].std() == pytest.approx(0.02, rel=0.05)
    matrices = {name: value for name, value in weights.items() if value.ndim > 1}
    zeros = {name.split(".")[-2] for name, value in matrices.items() if (value == 0).float().mean() > 0.5}
    assert zeros <= {"o_proj", "down_proj", "embed_tokens"}


def test_engines_find_what_they_look_for(big: Path):
    configs = {kind: json.loads((big / kind / "config.json").read_text()) for kind in KINDS}
    assert {config["vocab_size"] for config in configs.values()} == {TINY.target.vocab}
    assert {kind: detect_base(str(big / kind)) for kind in KINDS if kind != "target"} == {
        "eagle3": "EAGLE3",
        "eagle1": "EAGLE",
        "draft": "STANDALONE",
    }
    assert configs["eagle3"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
    assert find_classifier(C2TConfig(), "eagle3", str(big / "eagle3"))[1] == "beside the draft"
    record = json.loads((big / "target" / "inflated.json").read_text())
    assert record["shape"]["hidden"] == TINY.target.hidden and "git_sha" in record["run"]
    # a draft token's number in the target's vocabulary is its own
    assert not weights_in(big / "eagle3")["d2t"].any()


def test_a_head_with_a_vocabulary_of_its_own_keeps_it(tmp_path: Path):
    source, words = tmp_path / "pair", torch.arange(VOCAB) % 7
    shutil.copytree(pair_dir() / "eagle3", source / "eagle3")
    weights = load_file(source / "eagle3" / "model.safetensors")
    save_file({**weights, "d2t": words}, source / "eagle3" / "model.safetensors")
    inflate("eagle3", TINY, source, tmp_path, dtype=torch.float32)
    found = weights_in(tmp_path / "eagle3")["d2t"]
    assert torch.equal(found[:VOCAB], words) and not found[VOCAB:].any() and len(found) == TINY.draft_vocab


# parameters of Llama 3.1 8B and 70B, embedding and LM head apart, by their published configurations
@pytest.mark.parametrize(("name", "parameters"), [("8b", 8_030_261_248), ("70b", 70_553_706_496)])
def test_large_presets_have_the_shapes_that_transformers_expects(name: str, parameters: int):
    preset = PRESETS[name]
    for kind, shape in (("target", preset.target), ("draft", preset.draft)):
        config = json.loads((pair_dir() / kind / "config.json").read_text())
        small = load_file(pair_dir() / kind / "model.safetensors")
        weights = list(module._weights(kind, small, config, shape, preset.draft_vocab))
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**module._config(kind, config, shape, preset, torch.bfloat16)))
        assert {w.name: w.shape for w in weights} == {k: tuple(v.shape) for k, v in model.state_dict().items()}
        if kind == "target":
            assert sum(math.prod(weight.shape) for weight in weights) == parameters


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden": 252}, "hidden 252 for 256"),
        ({"layers": 4}, "layers 4 for 5"),
        ({"heads": 4}, "group 1 for 2"),
        ({"kv_heads": 1}, "kv_heads 1 for 2"),
        ({"intermediate": 703}, "intermediate 703 for 704"),
        ({"vocab": 4095}, "vocab 4095 for 4096"),
        ({"head_dim": 96}, "head_dim must be a multiple of 64, got 96"),
    ],
)
def test_a_shape_that_is_too_small_is_refused(change: dict[str, int], says: str, tmp_path: Path):
    preset = replace(TINY, target=replace(TINY.target, **change))
    with pytest.raises(ConfigError, match=says):
        inflate("target", preset, pair_dir(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("vocab", [VOCAB - 1, TINY.target.vocab + 1])
def test_a_head_knows_its_vocabulary_and_no_more_than_the_target(vocab: int, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"not {vocab}"):
        inflate("eagle3", replace(TINY, draft_vocab=vocab), pair_dir(), tmp_path)


def test_shapes_judge_themselves():
    for change in ({"hidden": 0}, {"layers": -1}, {"vocab": 1.5}):
        with pytest.raises(ConfigError, match="must be a positive number"):
            replace(TINY.target, **change)
    with pytest.raises(ConfigError, match=r"heads \(12\) must be a multiple of kv_heads \(5\)"):
        replace(TINY.target, kv_heads=5)
    with pytest.raises(ConfigError, match=r"hidden \(385\) must be a multiple of heads \(12\)"):
        replace(TINY.target, hidden=385)
    assert Shape.of(json.loads((pair_dir() / "target" / "config.json").read_text())).group == 2


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["--preset", "tiny", *arguments])
    return status, capsys.readouterr().err


def test_the_command_writes_a_pair_and_refuses_to_overwrite_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "--out", str(tmp_path), "--kinds", "eagle3") == (0, "")
    status, error = run(capsys, "--out", str(tmp_path), "--kinds", "eagle3")
    assert status == 2 and "is in the way" in error and error.count("\n") == 1
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_a_pair_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status, error = run(capsys, "--out", str(tmp_path / "out"), "--pair", str(tmp_path))
    assert status == 2 and "no target in" in error and not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    status, error = run(capsys, "--out", str(tmp_path))
    assert status == 2 and "target takes 0.0 GB" in error and list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_checkpoint_that_was_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def full(*arguments: object, **options: object) -> Iterator[None]:
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    status, error = run(capsys, "--out", str(tmp_path))
    assert (status, error) == (2, "inflate: No space left on device\n")
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status, error = run(capsys, "--out", str(tmp_path), "--device", "no_such_device")
    assert status == 2 and "no_such_device" in error and list(tmp_path.iterdir()) == []


def test_a_replaced_tie_needs_a_head_of_its_own(big: Path):
    assert "lm_head.weight" not in load_file(pair_dir() / "draft" / "model.safetensors")
    assert not json.loads((big / "draft" / "config.json").read_text())["tie_word_embeddings"]
