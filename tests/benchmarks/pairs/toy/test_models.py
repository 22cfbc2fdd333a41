"""The heads' unrolled pass against one token at a time, and the checkpoints' contents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from benchmarks.pairs.toy import load
from benchmarks.pairs.toy.models import new_draft, new_head, new_target
from benchmarks.pairs.toy.recipe import Recipe
from benchmarks.pairs.toy.tokenizer import train_tokenizer
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.heads import Eagle1Head, Eagle3Head, EagleHead, MtpHead, head_features, hidden_states

SMALL = Recipe(
    vocab_size=320,
    hidden=128,
    layers=4,
    intermediate=96,
    captured=(1, 2, 3),
    draft_hidden=64,
    draft_intermediate=64,
    small_hidden=64,
    small_intermediate=64,
)
# The two orders of summation differ in fp32 by some units in the last place of values around 1.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def causal_chain(head: EagleHead, embeds: torch.Tensor, features: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """The head's last hidden state for one base, by plain causal attention over a growing sequence.

    embeds: [n, hidden] of the tokens after each feature. later: [k, hidden] of the drafted tokens.
    """
    layer = {Eagle3Head: lambda: head.midlayer, Eagle1Head: lambda: head.layers[0], MtpHead: lambda: head}[type(head)]()
    residual = head.start(features)
    rows, hiddens = list(zip(embeds, residual, strict=True)), []
    queue = list(later)
    while True:
        hiddens = [plain_layer(head, layer, rows)]
        if not queue:
            return hiddens[-1]
        rows.append((queue.pop(0), hiddens[-1]))


def plain_layer(head: EagleHead, layer: torch.nn.Module, rows: list) -> torch.Tensor:
    embeds, hidden = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
    if isinstance(head, Eagle3Head):
        x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
    elif isinstance(head, MtpHead):
        blanked = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
        hidden = head.input_proj(torch.cat([head.hidden_layernorm(hidden), head.token_layernorm(blanked)], dim=-1))
        x = head.input_layernorm(hidden)
    else:
        x = hidden = head.fc(torch.cat([embeds, hidden], dim=-1))
    attention, n = layer.self_attn, len(rows)
    positions = torch.arange(n, dtype=torch.float32)[:, None]
    angles = positions * 10000.0 ** -(torch.arange(32) / 32.0)

    def heads(y: torch.Tensor, turn: bool) -> torch.Tensor:
        y = y.view(n, -1, 64).transpose(0, 1)
        if turn:
            pairs = torch.view_as_complex(torch.stack([y[..., :32], y[..., 32:]], dim=-1))
            turned = pairs * torch.polar(torch.ones_like(angles), angles)
            y = torch.cat([turned.real, turned.imag], dim=-1)
        return y

    q, k = heads(attention.q_proj(x), True), heads(attention.k_proj(x), True)
    v = heads(attention.v_proj(x), False)
    group = q.shape[0] // k.shape[0]
    out = F.scaled_dot_product_attention(
        q[None], k.repeat_interleave(group, 0)[None], v.repeat_interleave(group, 0)[None], is_causal=True
    )[0]
    hidden = hidden + attention.o_proj(out.transpose(0, 1).reshape(n, -1))
    out = (hidden + layer.mlp(layer.post_attention_layernorm(hidden)))[-1]
    return head.final_layernorm(out) if isinstance(head, MtpHead) else out


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "mtp"])
@pytest.mark.parametrize("first", [0, 5])
@torch.no_grad()
def test_unrolled_head_equals_one_token_at_a_time(kind: str, first: int) -> None:
    target = new_target(SMALL)
    head = new_head(kind, SMALL, target)
    tokens = torch.randint(0, 320, (2, 14), generator=torch.Generator().manual_seed(3))
    features = head_features(head, hidden_states(target, tokens))
    embedding = target.model.embed_tokens.weight
    unrolled = head.unroll(embedding, tokens, features, 4, first)
    base, row = 8, 1
    embeds = embedding[tokens[row]]
    for depth, states in enumerate(unrolled):
        later = embeds[base + 2 : base + 2 + depth]
        expected = causal_chain(head, embeds[1 : base + 2], features[row, : base + 1], later)
        torch.testing.assert_close(states[row, base - first], expected, **CLOSE)


@torch.no_grad()
def test_hidden_states_are_layer_inputs_and_the_normed_output() -> None:
    target = new_target(SMALL)
    tokens = torch.arange(10)[None]
    states = hidden_states(target, tokens)
    torch.testing.assert_close(states[0], target.model.embed_tokens(tokens))
    torch.testing.assert_close(target.lm_head(states[-1]), target(input_ids=tokens).logits, **CLOSE)
    seen: list[torch.Tensor] = []
    hook = target.model.layers[2].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    target(input_ids=tokens)
    hook.remove()
    torch.testing.assert_close(states[2], seen[0])


@pytest.mark.parametrize("kind", ["target", "small_target", "draft", "eagle3", "eagle1", "mtp"])
@torch.no_grad()
def test_checkpoint_comes_back(kind: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def f(x): return x\n"] * 3, 320)
    target = new_target(SMALL)
    load.save_checkpoint("target", target, SMALL, tokenizer, tmp_path / "target")
    target = load.load_llama("target", SMALL, tmp_path)
    made = {
        "target": lambda: target,
        "small_target": lambda: new_target(SMALL, "small_target"),
        "draft": lambda: new_draft(SMALL, target),
    }
    module = made.get(kind, lambda: new_head(kind, SMALL, target))()
    load.save_checkpoint(kind, module, SMALL, tokenizer, tmp_path / kind)
    back = load.load_llama(kind, SMALL, tmp_path) if kind in made else load.load_head(kind, SMALL, target, tmp_path)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], tensor.bfloat16().float(), rtol=0, atol=0)


def test_head_checkpoints_hold_no_embedding(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def f(x): return x\n"] * 3, 320)
    load.save_checkpoint("eagle1", new_head("eagle1", SMALL, new_target(SMALL)), SMALL, tokenizer, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    # SGLang puts "model." before the names of an EAGLE-1 head and takes embedding and LM head from the target
    assert {"fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight"} <= names
    assert not [name for name in names if "embed" in name or "lm_head" in name or name.startswith("model.")]


def test_captured_layers_are_numbered_as_sglang_does() -> None:
    config = load.checkpoint_config("eagle3", SMALL)["eagle_config"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(C2TError, match=r"target/model\.safetensors is missing"):
        load.load_llama("target", SMALL, tmp_path)
