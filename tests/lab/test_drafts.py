"""Every statistic of trees grown over a pair's weights, against full forward passes without any cache."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention

from benchmarks.pairs.toy import load_prompts
from benchmarks.pairs.toy.acceptance import accepted_runs, draft_guesses
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.collect import grow_both
from c2t_plugin.lab.drafts import HeadDraft
from c2t_plugin.lab.heads import MtpHead, head_features, hidden_states
from c2t_plugin.lab.pairs import load_pair
from c2t_plugin.lab.plans import TreeShape
from c2t_plugin.lab.texts import Texts, greedy_text, of_equal_length

KINDS = ("draft", "eagle3", "eagle1", "mtp")
SHAPE = TreeShape(k=3, layers=4, top_m=20)
NEW = 3


def texts_of(target, directory) -> Texts:
    prompts = dict(enumerate(prompt["ids"] for prompt in load_prompts(directory)))
    return greedy_text(target, {n: prompts[n] for n in next(of_equal_length(prompts, 2))}, NEW, SHAPE.layers)


@pytest.fixture(scope="module", params=KINDS)
def grown(request, tiny_pair):
    target, model = load_pair(tiny_pair, request.param)
    texts = texts_of(target, tiny_pair)
    tree, chain = grow_both(model, texts, SHAPE)
    return target, model, texts, tree, chain


@torch.no_grad()
def plain_logits(target, model, known: list[int], path: list[int]) -> torch.Tensor:
    """Logits after `path`, drafted below the text `known`, whose last token is the root; nothing is cached."""
    if not isinstance(model, HeadDraft):
        # SGLang's stand-alone draft never reads the first token
        return model.model(input_ids=torch.tensor([[*known[1:], *path]]), use_cache=False).logits[0, -1]
    head = model.head
    ids = known[1:]
    hidden = head.start(head_features(head, hidden_states(target, torch.tensor([known[:-1]]))))
    out = plain_layer(target, head, ids, hidden)
    for token in path:
        # below the root a head reads its own hidden state of the token before
        ids, hidden = [*ids, token], torch.cat([hidden, out[:, -1:]], dim=1)
        out = plain_layer(target, head, ids, hidden)
    if hasattr(head, "lm_head"):
        return head.lm_head(head.norm(out[0, -1]))
    return target.lm_head(out[0, -1])


def plain_layer(target, head, ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
    """One head layer over a whole sequence, with transformers' attention on the head's projections."""
    embeds = target.model.embed_tokens(torch.tensor([ids]))
    if hasattr(head, "midlayer"):
        layer = head.midlayer
        x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
    elif isinstance(head, MtpHead):
        layer = head
        # the engines blank the embedding at position 0
        embeds = embeds * (torch.arange(len(ids)) > 0)[:, None]
        hidden = head.input_proj(torch.cat([head.hidden_layernorm(hidden), head.token_layernorm(embeds)], dim=-1))
        x = head.input_layernorm(hidden)
    else:
        layer = head.layers[0]
        x = hidden = head.fc(torch.cat([embeds, hidden], dim=-1))
    attention = LlamaAttention(target.config, 0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, getattr(layer.self_attn, name))
    positions = torch.arange(len(ids))[None]
    hidden = hidden + attention(x, target.model.rotary_emb(x, positions), None)[0]
    out = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return head.final_layernorm(out) if isinstance(head, MtpHead) else out


def lineage(forest, tree: int, node: int) -> list[int]:
    """Nodes from below the root down to this one."""
    parent = int(forest.parent_ids[tree, node // forest.k])
    return [*(lineage(forest, tree, parent) if parent >= 0 else []), node]


def test_every_feature_of_sampled_nodes(grown) -> None:
    target, model, texts, tree, _ = grown
    stats = tree.stats()
    rng = random.Random(0)
    rows, states = len(tree), len(texts.roots)
    for _ in range(24):
        row, node = rng.randrange(rows), rng.randrange(tree.accepted.shape[1])
        nodes = lineage(tree, row, node)
        tokens = tree.token_ids[row, nodes].tolist()
        known = texts.token_ids[row // states, : texts.roots[row % states] + 1].tolist()
        each = [plain_logits(target, model, known, tokens[:i]).double().log_softmax(-1) for i in range(len(nodes))]
        # the distribution that the node was drawn from is the one after its parent, not the one after itself
        ordered = each[-1].sort(descending=True).values
        leading = ordered[: SHAPE.top_m]
        expected = {
            "joint_log_prob": sum(float(logs[token]) for logs, token in zip(each, tokens, strict=True)),
            "log_prob": float(each[-1][tokens[-1]]),
            "entropy": float(-(leading.exp() * leading).sum()),
            "depth": float(len(nodes)),
            "rank": float((each[-1] > each[-1][tokens[-1]]).sum()),
            "margin": float(ordered[0] - ordered[1]),
            "path_entropy": sum(float(-(p.exp() * p).sum()) for p in (x.sort().values[-SHAPE.top_m :] for x in each)),
        }
        found = {name: float(getattr(stats, name)[row, node]) for name in expected}
        # float32 sums in another order, through a few layers with logits of some tens
        assert found == pytest.approx(expected, abs=5e-4, rel=1e-5)


def test_nodes_may_be_read_in_any_order(grown) -> None:
    """As a heap reads them: one call holds nodes of different depths, and old nodes get children late."""
    target, model, texts, _, _ = grown
    with torch.no_grad():
        growth = model.at(texts.token_ids, texts.roots).start(4)
        rows, count = len(texts.token_ids) * len(texts.roots), len(texts.roots)
        found = [growth.root().logits()]
        # node numbers in reading order; -1 is the root
        calls = [[-1, -1], [0], [2, -1, 1], [3, 0, 4]]
        rng = random.Random(1)
        paths: list[list[list[int]]] = [[] for _ in range(rows)]
        for parents in calls:
            tokens = [[rng.randrange(1, 300) for _ in parents] for _ in range(rows)]
            for known, new in zip(paths, tokens, strict=True):
                known += [[*(known[up] if up >= 0 else []), token] for up, token in zip(parents, new, strict=True)]
            found.append(growth.extend(torch.tensor(tokens), torch.tensor([parents] * rows)).logits())
    answers = torch.cat(found[1:], dim=1)
    assert {len(path) for path in paths[0]} == {1, 2, 3, 4}
    for row in (0, count - 1, rows - 1):
        known = texts.token_ids[row // count, : texts.roots[row % count] + 1].tolist()
        # float32 products in another order, through a few layers with logits of some tens
        torch.testing.assert_close(found[0][row, 0], plain_logits(target, model, known, []), atol=5e-4, rtol=1e-5)
        for node, path in enumerate(paths[row]):
            expected = plain_logits(target, model, known, path)
            torch.testing.assert_close(answers[row, node], expected, atol=5e-4, rtol=1e-5)


def test_chain_statistics_are_those_of_the_most_probable_path(grown) -> None:
    target, model, texts, _, chain = grown
    known = texts.token_ids[1, : texts.roots[2] + 1].tolist()
    row, tokens, joint = len(texts.roots) + 2, chain.token_ids[len(texts.roots) + 2].tolist(), 0.0
    for depth in range(SHAPE.layers):
        logs = plain_logits(target, model, known, tokens[:depth]).double().log_softmax(-1)
        joint += float(logs.max())
        assert tokens[depth] == int(logs.argmax())
        # float32 sums in another order
        assert float(chain.joint_log_prob[row, depth]) == pytest.approx(joint, abs=5e-4, rel=1e-5)


def test_labels_follow_the_target(grown) -> None:
    """Against the target's own next tokens, one full forward pass at a time."""
    target, _, texts, tree, _ = grown
    for row in range(len(tree)):
        known = texts.token_ids[row // len(texts.roots), : texts.roots[row % len(texts.roots)] + 1].tolist()
        future: list[int] = []
        for _ in range(SHAPE.layers):
            future.append(int(target(input_ids=torch.tensor([[*known, *future]])).logits[0, -1].argmax()))
        for node in range(tree.accepted.shape[1]):
            path = tree.token_ids[row, lineage(tree, row, node)].tolist()
            assert bool(tree.accepted[row, node]) == (path == future[: len(path)])


def test_chains_are_accepted_as_the_pair_measures_it(grown) -> None:
    target, model, texts, _, chain = grown
    module = model.head if isinstance(model, HeadDraft) else model.model
    runs = accepted_runs(draft_guesses(module, target, texts.token_ids, SHAPE.layers), texts.token_ids)
    expected = runs[:, texts.roots[0] : texts.roots[-1] + 1].flatten()
    assert chain.accepted.int().sum(1).tolist() == expected.tolist()


def test_growing_several_texts_at_once_changes_nothing(grown) -> None:
    _, model, texts, tree, _ = grown
    one = Texts(texts.numbers[1:], texts.token_ids[1:], texts.roots)
    alone, _ = grow_both(model, one, SHAPE)
    second = tree[torch.arange(len(tree)) >= len(texts.roots)]
    assert torch.equal(alone.token_ids, second.token_ids)
    # float32 matrix products of another size
    torch.testing.assert_close(alone.joint_log_prob, second.joint_log_prob, atol=5e-4, rtol=0)


def test_a_missing_checkpoint_is_named(tmp_path) -> None:
    with pytest.raises(C2TError, match=r"no checkpoint in .*target"):
        load_pair(tmp_path, "draft")


@pytest.mark.parametrize(("kind", "words"), [("eagle1", 9), ("eagle3", 999)])
def test_another_vocabulary_is_refused(tiny_pair, tmp_path, kind: str, words: int) -> None:
    """Only an EAGLE-3 head may have fewer words than the target, and no head more."""
    for name in ("target", kind):
        (tmp_path / name).mkdir()
        config = json.loads((tiny_pair / name / "config.json").read_text(encoding="utf-8"))
        config |= {"draft_vocab_size": words} if name == kind else {}
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(C2TError, match=f"vocabulary of {words}"):
        load_pair(tmp_path, kind)
