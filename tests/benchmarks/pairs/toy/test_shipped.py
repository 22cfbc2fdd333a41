"""The pair in the repository: complete, small, and what its provenance says."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from benchmarks.pairs.toy import SHIPPED, load, load_prompts
from benchmarks.pairs.toy.acceptance import continue_prompts, mean_accepted, visits_of
from benchmarks.pairs.toy.tokenizer import END, END_ID
from c2t_plugin.lab.corpus import is_held_out
from c2t_plugin.lab.pair_files import load_tokenizer

MAX_BYTES = 24_500_000
DRAFTS = ("draft", "eagle3", "eagle1", "mtp")
KINDS = ("target", *DRAFTS)


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_the_pair_is_small() -> None:
    assert bytes_in(SHIPPED) <= MAX_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_that_were_evaluated(kind: str) -> None:
    recorded = json.loads((SHIPPED / "provenance.json").read_text(encoding="utf-8"))["weights"]
    assert hashlib.sha256((SHIPPED / kind / "model.safetensors").read_bytes()).hexdigest() == recorded[kind]


@pytest.mark.parametrize("kind", ["mtp", "small_target"])
def test_the_training_says_how_to_repeat_it(kind: str) -> None:
    provenance = json.loads((SHIPPED / "provenance.json").read_text(encoding="utf-8"))
    record = provenance["training"][kind]
    assert record["step"] == record["stage"]["steps"]
    assert record["stage"] == dataclasses.asdict(getattr(load.load_recipe(SHIPPED), kind))
    assert record["run"]["dirty"] is False and record["run"]["seed"] == load.load_recipe(SHIPPED).seed
    assert record["run"]["command"].startswith("c2t pair train")


@pytest.mark.parametrize("kind", KINDS)
def test_config_is_what_the_recipe_gives(kind: str) -> None:
    config = json.loads((SHIPPED / kind / "config.json").read_text(encoding="utf-8"))
    assert config == load.checkpoint_config(kind, load.load_recipe(SHIPPED))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_all_checkpoints_share_the_tokenizer(kind: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (SHIPPED / kind / name).read_bytes() == (SHIPPED / "target" / name).read_bytes()


def test_prompts_are_held_out_and_encode_to_their_ids() -> None:
    tokenizer = load_tokenizer(SHIPPED)
    assert tokenizer.token_to_id(END) == END_ID
    prompts = load_prompts(SHIPPED)
    one_in = load.load_recipe(SHIPPED).held_out_one_in
    assert len(prompts) == 256
    assert [p["file"] for p in prompts if not is_held_out(p["file"], one_in)] == []
    assert [p["file"] for p in prompts if tokenizer.encode(p["text"]).ids != p["ids"]] == []
    assert all(64 <= len(p["ids"]) <= 128 for p in prompts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_are_accepted_about_as_often_as_recorded(kind: str) -> None:
    recipe = load.load_recipe(SHIPPED)
    target = load.load_llama("target", recipe, SHIPPED)
    draft = load.load_llama(kind, recipe, SHIPPED) if kind == "draft" else load.load_head(kind, recipe, target, SHIPPED)
    recorded = json.loads((SHIPPED / "provenance.json").read_text(encoding="utf-8"))["acceptance"]
    prompts = [p["ids"] for p in load_prompts(SHIPPED)[:12]]
    texts = continue_prompts(target, prompts, new=40, gamma=recorded["gamma"], sample=False, seed=0)
    mean = mean_accepted(visits_of(draft, target, texts, recorded["gamma"], sample=False))
    # 12 prompts against the 128 of the record: the spread between prompts is about 0.7 tokens per step, so 0.2 expected
    assert mean == pytest.approx(recorded[kind]["greedy_all_states"]["mean"], abs=0.8)
