"""Recipe, stages and continuation on a tiny pair."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.pairs.toy.batches import TextMix
from benchmarks.pairs.toy.distil import teacher_targets
from benchmarks.pairs.toy.models import new_target
from benchmarks.pairs.toy.optimisers import parameter_kind
from benchmarks.pairs.toy.recipe import PRESETS, OwnText, Recipe, Stage
from benchmarks.pairs.toy.stage import StageRun
from benchmarks.pairs.toy.train import ALL_STAGES, Training
from benchmarks.pairs.toy.train_target import target_loss
from c2t_plugin.errors import C2TError, ConfigError

TINY_STAGE = Stage(steps=4, batch=2, muon_lr=0.02, embed_lr=0.01, head_lr=0.003, warmup=2)
TINY = Recipe(
    vocab_size=320,
    block=32,
    hidden=64,
    layers=4,
    intermediate=64,
    captured=(1, 2, 3),
    draft_hidden=64,
    draft_intermediate=64,
    small_hidden=64,
    small_layers=2,
    small_intermediate=64,
    held_out_one_in=4,
    target=TINY_STAGE,
    draft=TINY_STAGE,
    eagle3=TINY_STAGE,
    eagle1=TINY_STAGE,
    mtp=TINY_STAGE,
    small_target=TINY_STAGE,
    own_text=OwnText(sequences=6, batch=4, prompt=8, new=8, greedy_new=4),
)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_survive_json(preset: str) -> None:
    recipe = PRESETS[preset]()
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hiden": 128}, "unknown keys in recipe"),
        ({"hidden": 100}, "multiple of 64"),
        ({"captured": [1, 2, 5]}, "captured must be 3 layers"),
        ({"target": {"steps": 0, "batch": 1, "muon_lr": 1, "embed_lr": 1, "head_lr": 1}}, "steps must be positive"),
        ({"own_text": {"promt": 1}}, "unknown keys in own_text"),
    ],
)
def test_bad_recipes_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe.from_json(values)


def test_rates_rise_hold_and_fall_to_zero() -> None:
    stage = Stage(steps=100, batch=1, muon_lr=1, embed_lr=1, head_lr=1, warmup=10, cooldown=0.5)
    assert [stage.rate_factor(s) for s in (0, 9, 10, 50)] == [0.1, 1.0, 1.0, 1.0]
    # products of short decimals, exact but for the last bit
    assert [stage.rate_factor(s) for s in (75, 99)] == pytest.approx([0.5, 0.02])


def test_digest_of_a_stage_ignores_the_stages_after_it() -> None:
    other = Recipe.from_json({**TINY.to_json(), "eagle3": {**TINY.to_json()["eagle3"], "steps": 9}})
    assert other.digest("target") == TINY.digest("target")
    assert other.digest("eagle3") != TINY.digest("eagle3")


def test_batches_depend_on_seed_and_step_alone() -> None:
    corpus, own = np.arange(500, dtype=np.int16), np.full((3, 8), -1, dtype=np.int16)
    mix = TextMix(corpus, own, 8, seed=1)
    assert torch.equal(mix.batch(3, 4, 0.5), TextMix(corpus, own, 8, seed=1).batch(3, 4, 0.5))
    assert not torch.equal(mix.batch(3, 4, 0.5), mix.batch(4, 4, 0.5))
    assert (mix.batch(3, 4, 0.5)[:, 0] == -1).sum() == 2
    assert (mix.batch(3, 4, 1.0) >= 0).all()


def test_teacher_targets_move_weight_to_the_most_likely_token() -> None:
    goal = teacher_targets(torch.log(torch.tensor([[0.2, 0.5, 0.3]])), 0.2)
    # softmax of three logs in fp32
    torch.testing.assert_close(goal, torch.tensor([[0.16, 0.6, 0.24]]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("model.layers.0.mlp.up_proj.weight", (4, 4), "matrix"),
        ("fc.weight", (4, 8), "matrix"),
        ("model.embed_tokens.weight", (4, 4), "embed"),
        ("lm_head.weight", (4, 4), "rest"),
        ("norm.weight", (4,), "rest"),
    ],
)
def test_parameters_go_to_their_optimiser(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert parameter_kind(name, torch.zeros(shape)) == kind


def run_target(work: Path, resume: bool, stop_after: int | None) -> dict[str, torch.Tensor]:
    corpus = np.random.default_rng(0).integers(1, 320, 2000).astype(np.int16)
    target = new_target(TINY)
    run = StageRun("target", TINY.target, target, work, TINY.digest("target"), 64, resume, stop_after)
    run.run(target_loss(target, corpus, TINY, "cpu"))
    return target.state_dict()


def test_a_continued_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = run_target(tmp_path / "whole", resume=False, stop_after=None)
    run_target(tmp_path / "parts", resume=False, stop_after=1)
    half = run_target(tmp_path / "parts", resume=True, stop_after=2)
    parts = run_target(tmp_path / "parts", resume=True, stop_after=None)
    assert not torch.equal(half["lm_head.weight"], whole["lm_head.weight"])
    for name, tensor in whole.items():
        # same kernels on the same numbers in the same order
        assert torch.equal(parts[name], tensor), name


def test_state_is_neither_overwritten_nor_mixed_up(tmp_path: Path) -> None:
    run_target(tmp_path, resume=False, stop_after=1)
    with pytest.raises(C2TError, match="pass --resume"):
        run_target(tmp_path, resume=False, stop_after=1)
    state = torch.load(tmp_path / "state-target.pt", weights_only=True)
    torch.save({**state, "digest": "another"}, tmp_path / "state-target.pt")
    with pytest.raises(C2TError, match="another recipe"):
        run_target(tmp_path, resume=True, stop_after=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("pair")
    library = base / "library"
    library.mkdir()
    for number in range(24):
        lines = [f"def function_{chr(97 + number)}_{chr(97 + i)}(value):\n    return value\n" for i in range(26)]
        (library / f"module_{chr(97 + number)}.py").write_text("".join(lines), encoding="utf-8")
    Training(TINY, base / "out", base / "work", library).run(ALL_STAGES)
    return base


@pytest.mark.slow
def test_training_writes_a_pair_that_can_be_evaluated(trained: Path) -> None:
    from benchmarks.pairs.toy.evaluate import evaluate

    results = evaluate(trained / "out", trained / "work", prompts=4, seed=0, device="cpu")
    assert {"draft", "eagle3", "eagle1", "mtp", "small_target"} <= set(results)
    for figures in (
        *(results[name] for name in ("draft", "eagle3", "eagle1", "mtp")),
        results["small_target"]["draft"],
    ):
        assert 0 <= figures["greedy_all_states"]["mean"] <= 4
        assert sum(figures["greedy_histogram"]) == pytest.approx(1.0, abs=0.01)  # rounded to 3 places
    provenance = json.loads((trained / "out" / "provenance.json").read_text(encoding="utf-8"))
    assert provenance["training"]["target"]["step"] == 4
    assert len(provenance["training"]["corpus"]["sha256"]) == 64
    assert provenance["weights"].keys() == {"target", "small_target", "draft", "eagle3", "eagle1", "mtp"}


@pytest.mark.slow
def test_an_evaluation_keeps_the_records_of_stages_trained_elsewhere(trained: Path, tmp_path: Path) -> None:
    from benchmarks.pairs.toy.evaluate import evaluate

    out = tmp_path / "out"
    shutil.copytree(trained / "out", out, ignore=shutil.ignore_patterns("eagle*", "small_target", "draft"))
    evaluate(out, trained / "work", prompts=2, seed=0, device="cpu")
    later = tmp_path / "work"
    later.mkdir()
    (later / "record-mtp.json").write_text(json.dumps({"step": 9}), encoding="utf-8")
    results = evaluate(out, later, prompts=2, seed=0, device="cpu")
    assert not results.keys() & {"small_target", "draft", "eagle3", "eagle1"}
    training = json.loads((out / "provenance.json").read_text(encoding="utf-8"))["training"]
    assert (training["mtp"]["step"], training["target"]["step"]) == (9, 4)


def test_own_text_is_written_once(trained: Path) -> None:
    from benchmarks.pairs.toy import load
    from benchmarks.pairs.toy.own_text import write_own_text

    parts = sorted((trained / "work").glob("own-text-*.npy"))
    assert [np.load(part).shape for part in parts] == [(4, 16), (2, 16)]
    np.save(parts[0], np.zeros((4, 16), dtype=np.int16))
    target = load.load_llama("target", TINY, trained / "out")
    corpus = np.load(trained / "work" / "train.npy")
    again = write_own_text(target, corpus, TINY.own_text, TINY.seed, trained / "work", "cpu")
    assert (again[:4] == 0).all() and again.shape == (6, 16)


def test_unknown_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(C2TError, match="unknown stages"):
        Training(TINY, tmp_path, tmp_path, tmp_path).run(["tokeniser"])
