"""Own text, batches, the head, its training, shipping and evaluation, on a tiny target."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.pairs.smollm2 import batches, evaluate, head, ship, states, train
from benchmarks.pairs.smollm2.__main__ import parser
from benchmarks.pairs.smollm2.own_text import Shards, Text, Writing
from benchmarks.pairs.smollm2.ship import WEIGHTS
from benchmarks.pairs.toy.recipe import Stage
from c2t_plugin.classifier import CALIBRATED_NAME, FILE_NAME, load_classifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.heads import Eagle3Head, head_features, hidden_states

VOCAB, DRAFT_VOCAB = 64, 24


@pytest.fixture
def target(monkeypatch):
    captured = (1, 2, 3)
    for module in (states, batches, head, train):
        monkeypatch.setattr(module, "CAPTURED", captured)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        eos_token_id=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def texts_of(count, seed=0, low=12, high=30):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(low, high, count)
    return [
        Text(rng.integers(0, VOCAB, n).astype(np.uint16), int(rng.integers(3, n - 4)), i, 0.0)
        for i, n in enumerate(lengths)
    ]


def written(folder, target, count=20, size=8):
    shards = Shards(folder / "text", size)
    for text in texts_of(count):
        shards.add(text)
    shards.flush()
    states.write_states(target, shards, folder / "states")
    return batches.OwnTexts(shards, folder / "states")


def test_shards_keep_texts_and_know_what_is_done(tmp_path):
    texts = texts_of(7)
    shards = Shards(tmp_path, size=3)
    for text in texts:
        shards.add(text)
    assert shards.done() == {0, 1, 2, 3, 4, 5}
    shards.flush()
    again = list(Shards(tmp_path).texts())
    assert [(t.prompt, t.number) for t in again] == [(t.prompt, t.number) for t in texts]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(again, texts, strict=True))


def test_each_kind_of_prompt_gets_each_temperature():
    writing = Writing()
    drawn = [writing.temperature(number) for number in range(64)]
    assert drawn.count(0.0) == 48 and drawn.count(0.7) == drawn.count(1.0) == 8
    assert all({writing.temperature(8 * k + kind) for k in range(8)} == {0.0, 0.7, 1.0} for kind in range(8))


def apart(seen, expected):
    """How far a matrix [n, width] is from another, relative to the latter's norm.

    Single elements of bfloat16 passes differ by much where a processor adds up a batch in another order.
    """
    return float((seen.float() - expected.float()).norm() / expected.float().norm())


def test_states_are_those_of_the_target(tmp_path, target):
    texts = written(tmp_path, target)
    batch = texts.read(texts.rows[:3])
    for i, row in enumerate(texts.rows[:3]):
        known = hidden_states(target, batch.tokens[i : i + 1, : row.length])
        expected = torch.cat([known[layer] for layer in states.CAPTURED], dim=-1)[0]
        seen = batch.features[i, : row.length]
        assert apart(seen, expected) < 0.1 and apart(batch.known[i, : row.length], known[-1][0]) < 0.1
        # A layer or a position beside the right one is far away.
        assert apart(seen.roll(expected.shape[-1] // 3, -1), expected) > 0.5
        assert apart(seen[1:], expected[:-1]) > 0.5
    assert (batch.known[0, texts.rows[0].length :] == 0).all()


def test_an_epoch_reads_every_text_once(tmp_path, target):
    texts = written(tmp_path, target)
    seen = [i for part in batches.epoch_order(tuple(texts.rows), 4, 1, 0) for i in part]
    assert sorted(seen) == list(range(20))
    assert seen != [i for part in batches.epoch_order(tuple(texts.rows), 4, 1, 1) for i in part]
    assert texts.batch(2, 4, 1).tokens.equal(texts.batch(2, 4, 1).tokens)


def test_a_long_text_loses_the_begin_of_its_prompt():
    text = Text(np.arange(40, dtype=np.uint16), 25, 7, 0.0)
    assert batches.rows_of(0, [text, text], window=30) == [batches.Row(0, 10, 30, 15, 7), batches.Row(0, 50, 30, 15, 7)]
    assert batches.rows_of(0, [Text(np.arange(6, dtype=np.uint16), 5, 0, 0.0)]) == []


def test_fused_cross_entropy_is_the_plain_one():
    torch.manual_seed(0)
    known = torch.randn(600, 16, requires_grad=True)
    lm_head, goal = torch.randn(DRAFT_VOCAB, 16).bfloat16(), torch.randn(50, DRAFT_VOCAB).softmax(-1)
    picks = torch.randint(0, 50, (600,))
    loss = head.head_cross_entropy(known, lm_head, goal, picks)
    loss.backward()
    fused, known.grad = known.grad, None
    plain = F.cross_entropy(known @ lm_head.float().T, goal[picks])
    plain.backward()
    torch.testing.assert_close(loss, plain, rtol=0.01, atol=0.01)
    torch.testing.assert_close(fused, known.grad, rtol=0.05, atol=1e-4)


def test_what_the_loss_learns_from(tmp_path, target, monkeypatch):
    monkeypatch.setattr(head, "LEAD", 5)
    texts = written(tmp_path, target)
    draft = head.new_head(target, torch.arange(DRAFT_VOCAB), 1)
    batch = texts.read(texts.rows[:4])
    lesson = head.Distillation(draft, target)
    first = min(5, int(batch.prompts.min())) - 2
    for j in range(head.UNROLL):
        usable = lesson.usable(batch, first, j)
        for i, row in enumerate(texts.rows[:4]):
            # a teacher's position is where the target predicts a token that the head can say
            positions = range(first + 1 + j, row.length)
            tokens = batch.tokens[i].tolist()
            expected = [p for p in positions if p == row.length - 1 or tokens[p + 1] < DRAFT_VOCAB]
            assert (usable[i].nonzero().flatten() + first + 1 + j).tolist() == expected


def test_the_published_layout_computes_the_same_logits(tmp_path, target):
    vocabulary = torch.tensor(sorted(torch.randperm(VOCAB)[:DRAFT_VOCAB].tolist()))
    draft = head.new_head(target, vocabulary, 1)
    torch.nn.init.normal_(draft.turn.weight)
    head.write_head(draft.state_dict(), vocabulary, target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shift, inside = tensors.pop("d2t"), tensors.pop("t2d")
    assert (shift + torch.arange(DRAFT_VOCAB)).equal(vocabulary)
    assert inside.nonzero().flatten().equal(vocabulary)
    published = Eagle3Head(head.head_shape(target.config, DRAFT_VOCAB))
    published.load_state_dict(tensors)
    tokens = torch.randint(0, VOCAB, (2, 12))
    features = head_features(published, hidden_states(target, tokens))
    embedding = target.model.embed_tokens.weight
    for ours, theirs in zip(
        draft.unroll(embedding, tokens, features, 3), published.unroll(embedding, tokens, features, 3), strict=True
    ):
        expected = published.logits(theirs, embedding)
        torch.testing.assert_close(draft.logits(ours, embedding), expected, rtol=0.05, atol=0.05)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


def test_the_draft_vocabulary_is_the_most_frequent_and_those_that_must_be():
    counts = torch.tensor([5, 0, 9, 3, 9])
    assert head.draft_vocabulary(counts, 3).tolist() == [0, 2, 4]
    assert head.draft_vocabulary(counts, 3, always=(1,)).tolist() == [1, 2, 4]


def test_training_goes_on_where_it_stopped(tmp_path, target, monkeypatch):
    monkeypatch.setattr(train.LlamaForCausalLM, "from_pretrained", lambda *a, **k: target)
    stage = Stage(steps=6, batch=4, muon_lr=0.02, embed_lr=0.002, head_lr=0.002, warmup=2)
    recipe = train.HeadRecipe(words=DRAFT_VOCAB, stage=stage)
    once, twice = tmp_path / "once", tmp_path / "twice"
    for work in (once, twice):
        written(work, target)
    assert train.train(tmp_path, once, recipe)
    assert not train.train(tmp_path, twice, recipe, stop_after=2)
    assert train.train(tmp_path, twice, recipe)
    (first, step), (second, _) = (train.trained_weights(work, recipe) for work in (once, twice))
    assert step == 6 and len(json.loads(train.vocabulary_path(once, DRAFT_VOCAB).read_text())) == DRAFT_VOCAB
    for name in first:
        torch.testing.assert_close(first[name], second[name])
    longer = dataclasses.replace(recipe, stage=dataclasses.replace(stage, steps=8))
    assert longer.digest() == recipe.digest() != train.HeadRecipe(words=DRAFT_VOCAB).digest()


def test_an_untrained_head_is_a_clear_error(tmp_path):
    with pytest.raises(C2TError, match="train --work"):
        train.trained_weights(tmp_path, train.HeadRecipe())


def test_shipped_weights_are_within_half_a_level(tmp_path, target):
    vocabulary = torch.arange(3, 3 + DRAFT_VOCAB)
    weights = head.new_head(target, vocabulary, 1).state_dict()
    with pytest.raises(C2TError, match="ship"):
        ship.read_shipped(tmp_path)
    ship.write_shipped(weights, vocabulary, tmp_path, {"steps": 3})
    read, found = ship.read_shipped(tmp_path)
    assert found.equal(vocabulary) and read.keys() == weights.keys()
    for name, weight in weights.items():
        if weight.ndim == 2:
            half = weight.abs().amax(-1, keepdim=True) / ship.LEVELS / 2
            assert ((read[name] - weight).abs() <= half * 1.001 + 1e-12).all()
        else:
            assert read[name].equal(weight)


def chain(target, draft, tokens, root):
    """Accepted draft tokens of a static chain after the root, drafted and verified step by step."""
    text = tokens[: root + 1]
    known = torch.tensor([[*text, 0]])
    features = head_features(draft, hidden_states(target, known))
    embedding = target.model.embed_tokens.weight
    accepted = 0
    for depth in range(evaluate.GAMMA):
        row = torch.tensor([text + [0] * (evaluate.GAMMA + 1)])
        padded = F.pad(features, (0, 0, 0, row.shape[1] - features.shape[1]))
        hidden = draft.unroll(embedding, row, padded, evaluate.GAMMA)[depth][0, root - 1]
        guess = int(draft.vocabulary[F.linear(draft.known(hidden), draft.rows.float()).argmax(-1)])
        if root + 1 + depth >= len(tokens) or tokens[root + 1 + depth] != guess:
            return accepted
        accepted += 1
        text = [*text, guess]
    return accepted


def test_evaluation_counts_what_step_by_step_drafting_accepts(tmp_path, target, monkeypatch):
    draft = head.new_head(target, torch.arange(DRAFT_VOCAB), 1)
    texts = written(tmp_path, target)
    # texts that go on as the head would, so that chains have all lengths
    rows = []
    for text in texts_of(6, low=20):
        tokens = text.tokens.tolist()
        for position in range(text.prompt + 1, len(tokens) - 1):
            if position % 7:
                features = head_features(draft, hidden_states(target, torch.tensor([tokens[:position]])))
                hidden = draft.unroll(
                    target.model.embed_tokens.weight,
                    torch.tensor([tokens[: position + 1]]),
                    F.pad(features, (0, 0, 0, 1)),
                    1,
                )[0][0, position - 2]
                tokens[position] = int(F.linear(draft.known(hidden), draft.rows.float()).argmax(-1))
        rows.append(Text(np.array(tokens, np.uint16), text.prompt, text.number, 0.0))
    shards = Shards(tmp_path / "new" / "text", 6)
    for row in rows:
        shards.add(row)
    monkeypatch.setattr(states.torch, "autocast", lambda *a, **k: torch.enable_grad())
    states.write_states(target, shards, tmp_path / "new" / "states")
    texts = batches.OwnTexts(shards, tmp_path / "new" / "states")
    measured = evaluate.measure(draft, target, texts, [{"kind": "list"}] * 6, 0)
    totals = set()
    for one, row in zip(measured, rows, strict=True):
        tokens, root, expected = row.tokens.tolist(), row.prompt, []
        while root < len(tokens) - 1:
            expected.append(chain(target, draft, tokens, root))
            root += expected[-1] + 1
        assert one.depths.sum(1).tolist() == expected
        totals |= set(expected)
    assert len(totals) > 1


def test_sampled_text_counts_the_targets_chances(tmp_path, target):
    draft = head.new_head(target, torch.arange(DRAFT_VOCAB), 1)
    texts = written(tmp_path, target)
    measured = evaluate.measure(draft, target, texts, [{"kind": str(i % 2)} for i in range(20)], 0.7)
    depths = np.concatenate([one.depths for one in measured])
    assert ((depths >= 0) & (depths <= 1)).all() and 0 < depths[:, 0].mean() < 1
    figures = evaluate.summarise(measured)
    assert set(figures) == {"all", "0", "1"}
    assert figures["all"]["verify_steps"] == figures["0"]["verify_steps"] + figures["1"]["verify_steps"]


def test_the_shipped_head_is_whole_and_light():
    weights, vocabulary = ship.read_shipped()
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64
    )
    draft = head.TurnedHead(head.head_shape(config, len(vocabulary)), vocabulary, torch.zeros(len(vocabulary), 576))
    draft.load_state_dict(weights)
    assert (vocabulary.diff() > 0).all() and 2 in vocabulary and int(vocabulary.max()) < 49152
    assert all(weight.isfinite().all() for weight in weights.values())
    assert (ship.WEIGHTS / ship.FILE).stat().st_size < 11_000_000


def test_the_classifiers_beside_the_shipped_head_are_of_its_kind():
    plain, calibrated = (load_classifier(WEIGHTS / name).spec for name in (FILE_NAME, CALIBRATED_NAME))
    assert plain.training["recipe"] == calibrated.training["recipe"] == "extended"
    assert (plain.training["calibrated"], calibrated.training["calibrated"]) == ("none", "chain")
    assert plain.features == calibrated.features and 0.0 < plain.suggested_beta < 1.0


@pytest.mark.parametrize("name", ["--vocabulary", "--words"])
def test_the_draft_vocabularys_size_has_its_old_name_too(name: str):
    assert parser().parse_args(["ship", name, "4096"]).vocabulary == 4096


def test_what_is_published_keeps_its_names():
    """The tensor of the shipped file, and the recipe in its notes, which digests are made from."""
    assert "words" in load_file(WEIGHTS / ship.FILE)
    assert dataclasses.asdict(train.HeadRecipe())["words"] == 8192
