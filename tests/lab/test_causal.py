"""Pairs of any causal LMs: what is recorded of them is what full forward passes say, whatever cache they keep."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from transformers import Gemma2Config, GPT2Config, LlamaForCausalLM, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from c2t_plugin.errors import C2TError
from c2t_plugin.lab import collect as module
from c2t_plugin.lab import pairs
from c2t_plugin.lab.causal import CausalDraft
from c2t_plugin.lab.collect import collect
from c2t_plugin.lab.drafts import StandaloneDraft
from c2t_plugin.lab.pairs import load_pair
from c2t_plugin.lab.plans import CollectPlan, TreeShape
from c2t_plugin.lab.texts import greedy_text
from c2t_plugin.traces.file import STATES, load_traces
from c2t_plugin.traces.forest import TABLES

pytestmark = pytest.mark.slow

VOCAB = 300
SMALL = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL, **LAYERS, tie_word_embeddings=True),
    "gpt2": GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    # its cache forgets what lies before the last 8 tokens, in every second layer
    "gemma2": Gemma2Config(**SMALL, **LAYERS, head_dim=8, query_pre_attn_scalar=8, sliding_window=8),
}
SHAPE = TreeShape(k=3, layers=4, top_m=20)
PLAN = CollectPlan("draft", SHAPE, trees=12, prompts="held-out", new_tokens=3)


def save_random(config, path, seed: int) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # untrained logits are almost equal
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(path)


@pytest.fixture(scope="module", params=CONFIGS)
def foreign_pair(request, tiny_pair, tmp_path_factory):
    """Target and draft of one architecture that is not the pair's, with the pair's prompts and tokenizer."""
    directory = tmp_path_factory.mktemp(request.param)
    for seed, name in enumerate(("target", "draft")):
        save_random(CONFIGS[request.param], directory / name, seed)
        shutil.copy(tiny_pair / "target" / "tokenizer.json", directory / name)
    for name in ("held_out_prompts.json", "held_out_files.json"):
        shutil.copy(tiny_pair / name, directory)
    return directory


def test_nodes_in_any_order_are_read_as_without_a_cache(foreign_pair) -> None:
    target, draft = load_pair(foreign_pair, "draft")
    assert isinstance(draft, CausalDraft) and not isinstance(target, LlamaForCausalLM)
    rng = random.Random(1)
    prompts = {number: [rng.randrange(1, VOCAB) for _ in range(12)] for number in range(2)}
    with torch.no_grad():
        texts = greedy_text(target, prompts, 3, SHAPE.layers)
        growth = draft.at(texts.token_ids, texts.roots).start(4)
        found = [growth.root().logits()]
        paths: list[list[list[int]]] = [[] for _ in range(6)]
        # nodes of different depths in one call; old nodes get children late
        for parents in ([-1, -1], [0], [2, -1, 1], [3, 0, 4]):
            tokens = [[rng.randrange(1, VOCAB) for _ in parents] for _ in range(6)]
            for known, new in zip(paths, tokens, strict=True):
                known += [[*(known[up] if up >= 0 else []), token] for up, token in zip(parents, new, strict=True)]
            found.append(growth.extend(torch.tensor(tokens), torch.tensor([parents] * 6)).logits())
        answers = torch.cat(found, dim=1)
        assert {len(path) for path in paths[0]} == {1, 2, 3, 4}
        for row in range(6):
            # as in SGLang the draft has not read the first token
            known = texts.token_ids[row // 3, 1 : texts.roots[row % 3] + 1].tolist()
            for node, path in enumerate([[], *paths[row]]):
                expected = draft.model(input_ids=torch.tensor([[*known, *path]]), use_cache=False).logits[0, -1]
                # float32 products in another order, with logits of some tens
                torch.testing.assert_close(answers[row, node], expected, atol=5e-4, rtol=1e-5)
        with pytest.raises(C2TError, match="deeper than the layers"):
            growth.extend(torch.zeros(6, 1, dtype=torch.int64), torch.full((6, 1), 6))


def test_labels_follow_the_target(foreign_pair) -> None:
    traces = collect(foreign_pair, PLAN)
    target, _ = load_pair(foreign_pair, "draft")
    prompts = module._pool(foreign_pair, PLAN)
    seen = 0
    for row in range(0, len(traces), 5):
        known = list(prompts[int(traces.prompt[row])].token_ids)
        future: list[int] = []
        for _ in range(1 + int(traces.step[row]) + SHAPE.layers):
            future.append(int(target(input_ids=torch.tensor([[*known, *future]])).logits[0, -1].argmax()))
        after = future[int(traces.step[row]) + 1 :]
        hits = [token == true for token, true in zip(traces.chain.token_ids[row].tolist(), after, strict=True)]
        expected = [all(hits[: place + 1]) for place in range(SHAPE.layers)]
        assert traces.chain.accepted[row].tolist() == expected
        seen += 1
    assert seen > 1


def test_a_llama_is_drafted_with_alike_both_ways(tiny_pair, monkeypatch) -> None:
    own = collect(tiny_pair, PLAN)
    assert isinstance(load_pair(tiny_pair, "draft")[1], StandaloneDraft)
    monkeypatch.setattr(pairs, "stand_alone", CausalDraft)
    other = collect(tiny_pair, PLAN)
    for part in ("tree", "chain"):
        for name in TABLES:
            one, two = (getattr(getattr(traces, part), name) for traces in (own, other))
            if one.is_floating_point():
                # float32 products of another shape, with logits of some tens
                torch.testing.assert_close(one, two, atol=5e-4, rtol=1e-5)
            else:
                assert torch.equal(one, two), name
    assert all(torch.equal(getattr(own, name), getattr(other, name)) for name in (*STATES, "group"))


PROMPTS = [
    {"text": "def f(x):\n    return x\n" * 3, "source": "one"},
    {"text": "return x\n" * 4},
    {"text": "def g(y):\n    return f(y)\n" * 2, "source": "one"},
]


def test_own_prompts_by_command(foreign_pair, tmp_path, capsys) -> None:
    path, out = tmp_path / "own.jsonl", tmp_path / "own.traces"
    path.write_text("".join(json.dumps(each) + "\n" for each in PROMPTS), encoding="utf-8")
    command = ["--pair", str(foreign_pair), "--draft", "draft", "--prompts", str(path), "--trees", "6"]
    command += ["--new-tokens", "2", "--k", "2", "--layers", "3", "--top-m", "20", "--out", str(out)]
    assert module.main(command) == 0
    traces = load_traces(out)
    assert sorted(zip(traces.prompt.tolist(), traces.group.tolist(), strict=True)) == sorted(
        [(0, 0), (1, 1), (2, 0)] * 2
    )
    assert traces.header["prompts"] == "own.jsonl" and traces.header["pair"]["kind"] == "draft"
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: a JSON object"),
        ('{"prompt": "x"}', "line 2: .*'text'"),
        ('["x"]', "line 2"),
        ('{"text": 5}', "line 2"),
        ('{"text": ""}', "0 tokens, at least 2"),
        ("[" * 100_000, "line 2: .*maximum recursion"),
        ("1" * 5_000, "line 2: .*Exceeds the limit"),
        ("\udcff", "is no text in UTF-8"),
    ],
)
def test_a_prompt_file_with_a_bad_line_is_refused(tiny_pair, tmp_path, line, message) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(PROMPTS[0]) + "\n" + line + "\n", encoding="utf-8", errors="surrogateescape")
    with pytest.raises(C2TError, match=message) as error:
        collect(tiny_pair, CollectPlan("draft", SHAPE, trees=1, prompts=str(path)))
    assert "\n" not in str(error.value)


def test_a_missing_prompt_file_is_named(tiny_pair, tmp_path) -> None:
    with pytest.raises(C2TError, match=r"prompt file not found: .*none\.jsonl"):
        collect(tiny_pair, CollectPlan("draft", SHAPE, trees=1, prompts=str(tmp_path / "none.jsonl")))


def copied(pair, tmp_path):
    return shutil.copytree(pair, tmp_path / "pair")


def test_other_tokens_under_the_same_numbers_are_refused(foreign_pair, tmp_path) -> None:
    directory = copied(foreign_pair, tmp_path)
    path = directory / "draft" / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    one, two = list(vocab)[100], list(vocab)[101]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(C2TError, match="differ in 4 entries"):
        load_pair(directory, "draft")


def test_a_padded_vocabulary_is_no_other_vocabulary(foreign_pair, tmp_path) -> None:
    directory = copied(foreign_pair, tmp_path)
    config = Qwen2Config(**{**SMALL, "vocab_size": VOCAB + 20}, **LAYERS)
    save_random(config, directory / "draft", 3)
    wide = collect(directory, PLAN)
    assert wide.header["pair"]["draft_vocab_size"] == VOCAB + 20
    (directory / "draft" / "tokenizer.json").unlink()
    with pytest.raises(C2TError, match="vocabulary of 320, the target of 300"):
        load_pair(directory, "draft")


def test_a_text_longer_than_the_model_is_refused(foreign_pair) -> None:
    with pytest.raises(C2TError, match="has 64 positions, 76 are needed") as error:
        collect(foreign_pair, CollectPlan("draft", TreeShape(2, 29, 20), trees=32, prompts="held-out", new_tokens=32))
    assert "\n" not in str(error.value)


def test_a_head_of_another_target_is_refused(foreign_pair, tiny_pair, tmp_path) -> None:
    directory = copied(foreign_pair, tmp_path)
    shutil.copytree(tiny_pair / "eagle3", directory / "eagle3")
    with pytest.raises(C2TError, match="hidden states of 128, the target of 32"):
        load_pair(directory, "eagle3")


def test_a_model_without_a_cache_is_refused(foreign_pair) -> None:
    target, _ = load_pair(foreign_pair, "draft")

    def without_cache(**inputs):
        out = target(**inputs)
        out.past_key_values = None
        return out

    with pytest.raises(C2TError, match="keeps no past_key_values"):
        CausalDraft(without_cache).at(torch.ones(1, 8, dtype=torch.int64), range(4, 6))


def test_what_is_no_causal_lm_is_named(foreign_pair, tmp_path) -> None:
    directory = copied(foreign_pair, tmp_path)
    (directory / "draft" / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "model_type": "medusa"}))
    with pytest.raises(C2TError, match="draft is not a causal LM that transformers can load") as error:
        load_pair(directory, "draft")
    assert "\n" not in str(error.value)
