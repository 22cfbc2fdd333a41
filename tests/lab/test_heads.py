"""EAGLE-3 heads as they are published: fewer words than the target, shapes and rotation of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.collect import grow_both
from c2t_plugin.lab.drafts import HeadDraft
from c2t_plugin.lab.heads import HEADS, Eagle3Head, hidden_states
from c2t_plugin.lab.pairs import head_shape, load_pair
from c2t_plugin.lab.plans import TreeShape
from c2t_plugin.lab.texts import greedy_text

VOCAB, WORDS, HIDDEN, LAYERS = 200, 60, 64, 7
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": VOCAB,
    "draft_vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "rope_scaling": ROPE,
}
SHAPE = TreeShape(k=3, layers=3, top_m=20)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 target and a head with a third of its words, untrained."""
    directory = tmp_path_factory.mktemp("published")
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=0,
    )
    target = Qwen3ForCausalLM(config)
    head = HEADS["eagle3"](head_shape("eagle3", CONFIG, LAYERS))
    for module in (target, head):
        with torch.no_grad():
            for parameter in module.parameters():
                # untrained logits are almost equal
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    target.save_pretrained(directory / "target")
    words = torch.randperm(VOCAB)[:WORDS].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, words, True)
    extra = {"d2t": words - torch.arange(WORDS), "t2d": known, "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    (directory / "eagle3").mkdir()
    save_file({**head.state_dict(), **extra}, directory / "eagle3" / "model.safetensors")
    (directory / "eagle3" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return directory


def changed(pair: Path, to: Path, config: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> Path:
    """A copy of the pair whose head has another configuration or further tensors."""
    shutil.copytree(pair, to, dirs_exist_ok=True)
    (to / "eagle3" / "config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
    file = to / "eagle3" / "model.safetensors"
    save_file(load_file(file) | (weights or {}), file)
    return to


@torch.no_grad()
def root_logits(target: Any, head: Eagle3Head, known: list[int]) -> torch.Tensor:
    """(WORDS,): the head's logits after a text, with transformers' attention and rotation by the head's own file."""
    config = LlamaConfig.from_dict(CONFIG)
    states = hidden_states(target, torch.tensor([known[:-1]]))
    hidden = head.fc(torch.cat([states[i] for i in (2, LAYERS // 2, LAYERS - 3)], dim=-1))
    layer, embeds = head.midlayer, target.get_input_embeddings()(torch.tensor([known[1:]]))
    x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
    attention = LlamaAttention(config, 0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, getattr(layer.self_attn, name))
    length = x.shape[1]
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    rotary = LlamaRotaryEmbedding(config)(x, torch.arange(length)[None])
    hidden = hidden + attention(x, position_embeddings=rotary, attention_mask=mask)[0]
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return head.lm_head(head.norm(hidden[0, -1]))


def test_a_head_with_fewer_words_drafts_the_targets_tokens(pair: Path) -> None:
    target, model = load_pair(pair, "eagle3")
    assert isinstance(model, HeadDraft) and isinstance(model.head, Eagle3Head) and model.token_ids is not None
    text = torch.randint(1, VOCAB, (1, 24), generator=torch.Generator().manual_seed(1))
    found = model.at(text, range(20, 22)).start(2).root().logits()
    for row, root in enumerate((20, 21)):
        expected = root_logits(target, model.head, text[0, : root + 1].tolist())
        # float32 products in another order
        torch.testing.assert_close(found[row, 0, model.token_ids], expected, atol=2e-4, rtol=1e-5)
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, model.token_ids, False)
    assert (found[..., others] == -torch.inf).all()


def test_its_trees_are_recorded(pair: Path) -> None:
    target, model = load_pair(pair, "eagle3")
    prompts = {0: list(range(1, 13)), 1: list(range(20, 32))}
    tree, chain = grow_both(model, greedy_text(target, prompts, 3, SHAPE.layers), SHAPE)
    assert torch.isin(tree.token_ids, model.token_ids).all()
    for forest in (tree, chain):
        assert all(getattr(forest, name).isfinite().all() for name in ("joint_log_prob", "entropy", "margin"))


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ({"hidden_size": 32}, {}, "hidden states of 32, the target of 64"),
        ({"intermediate_size": 40}, {}, "is not an eagle3 head of the layout that is read here: .*size mismatch"),
        ({}, {"midlayer.self_attn.q_proj.bias": torch.zeros(128)}, "Unexpected key.*q_proj.bias"),
    ],
)
def test_what_does_not_fit_is_refused(
    pair: Path, tmp_path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(C2TError, match=message):
        load_pair(changed(pair, tmp_path, config, weights), "eagle3")
