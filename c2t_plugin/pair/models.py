"""Shapes: the target and the stand-alone draft are transformers' Llama, the two EAGLE heads are small modules here.

The heads compute what SGLang's LlamaForCausalLMEagle3 and LlamaForCausalLMEagle compute from the same weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from c2t_plugin.pair.recipe import HEAD_DIM, Recipe

ROPE_THETA = 10000.0
RMS_EPS = 1e-5
# keys and values of every draft step so far
Chain = list[tuple[torch.Tensor, torch.Tensor]]


def llama_config(recipe: Recipe, hidden: int, layers: int, intermediate: int, kv_heads: int, tied: bool) -> LlamaConfig:
    """Configuration of a Llama with heads of HEAD_DIM."""
    return LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rms_norm_eps=RMS_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def new_target(recipe: Recipe) -> LlamaForCausalLM:
    """An untrained target, fp32; its weights depend on the recipe's seed alone."""
    torch.manual_seed(recipe.seed)
    config = llama_config(recipe, recipe.hidden, recipe.layers, recipe.intermediate, recipe.kv_heads, tied=False)
    return LlamaForCausalLM(config)


def new_draft(recipe: Recipe, target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A stand-alone draft, fp32, whose tied embedding starts as the target's LM head in fewer dimensions.

    The dimensions kept are those of the largest singular values, so that the logits' geometry is known from the start.
    """
    torch.manual_seed(recipe.seed + 1)
    size = recipe.draft_hidden
    config = llama_config(recipe, size, recipe.draft_layers, recipe.draft_intermediate, 1, tied=True)
    draft = LlamaForCausalLM(config)
    with torch.no_grad():
        head = (target.lm_head.weight * target.model.norm.weight).float()
        directions = torch.linalg.svd(head, full_matrices=False).Vh[:size]
        draft.model.embed_tokens.weight[:, : len(directions)] = head @ directions.T
    return draft


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, RMS_EPS)


class ChainAttention(nn.Module):
    """Attention of a head that drafts a chain from many positions (bases) of a text at once.

    Draft step 0 at base t attends to step 0 at bases <= t. Step j attends to these and to its own chain, steps 1..j
    at base t. Keys carry their rotary position: base t, step j sits at position t + j.
    """

    def __init__(self, input_size: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q_proj = nn.Linear(input_size, heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(input_size, kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(input_size, kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(heads * HEAD_DIM, hidden, bias=False)

    def forward(self, x: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        """x: [batch, positions, input_size] of step len(chain); its keys and values are appended to chain.

        Step 0 gets all positions of the text and answers for bases from `first` on; later steps get these bases only.
        Returns [batch, bases, hidden].
        """
        step = len(chain)
        start = first if step else 0
        repeat = self.heads // self.kv_heads
        k = _rotate(self._split(self.k_proj(x), self.kv_heads), start + step).repeat_interleave(repeat, dim=1)
        v = self._split(self.v_proj(x), self.kv_heads).repeat_interleave(repeat, dim=1)
        chain.append((k, v))
        q = _rotate(self._split(self.q_proj(x[:, first - start :]), self.heads), first + step)
        out = _attend(q, chain, first)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    @staticmethod
    def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, HEAD_DIM)).transpose(1, 2)


def _rotate(x: torch.Tensor, offset: int) -> torch.Tensor:
    """Rotary embedding of x [..., positions, HEAD_DIM], whose first position is `offset`."""
    rates = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2, device=x.device).float() / HEAD_DIM)
    angles = (torch.arange(x.shape[-2], device=x.device).float() + offset)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def _attend(q: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
    """q [batch, heads, bases, HEAD_DIM] over the causal step 0 and the chain's own later steps."""
    text_keys, text_values = chain[0]
    length = text_keys.shape[2]
    future = torch.ones(q.shape[2], length, dtype=torch.bool, device=q.device).triu(1 + first)
    text = (q @ text_keys.transpose(-1, -2)).float().masked_fill(future, float("-inf"))
    own = [(q * k).sum(-1, keepdim=True).float() for k, _ in chain[1:]]
    weights = torch.cat([text, *own], dim=-1).mul(HEAD_DIM**-0.5).softmax(-1).to(q.dtype)
    out = weights[..., :length] @ text_values
    for i, (_, values) in enumerate(chain[1:]):
        out = out + weights[..., length + i, None] * values
    return out


class GatedMLP(nn.Module):
    """Llama's feed-forward block."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Layer(nn.Module):
    """The decoder layer of an EAGLE-3 head: attention reads the embedding beside the hidden state."""

    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.self_attn = ChainAttention(2 * hidden, hidden, heads, kv_heads)
        self.mlp = GatedMLP(hidden, intermediate)
        self.input_layernorm = RMSNorm(hidden)
        self.hidden_norm = RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        attended = self.self_attn(both, chain, first)
        hidden = hidden[:, -attended.shape[1] :] + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle1Layer(nn.Module):
    """The decoder layer of an EAGLE-1 head: Llama's without the first norm."""

    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.self_attn = ChainAttention(hidden, hidden, heads, kv_heads)
        self.mlp = GatedMLP(hidden, intermediate)
        self.post_attention_layernorm = RMSNorm(hidden)

    def forward(self, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        attended = self.self_attn(hidden, chain, first)
        hidden = hidden[:, -attended.shape[1] :] + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """Common part of both heads; the embedding is the target's and not a parameter here.

    captured: the target's layers whose inputs are the features (EAGLE-3), empty for EAGLE-1, whose feature is the
    target's hidden state after its final norm.
    """

    captured: tuple[int, ...] = ()

    def unroll(
        self, embedding: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor, steps: int, first: int = 0
    ) -> list[torch.Tensor]:
        """Draft `steps` tokens from every position (base) >= first of given texts, following the text.

        embedding: [vocabulary, hidden]. tokens: [batch, length]. features: [batch, length, features] of the target.
        Returns `steps` hidden states [batch, length - first, hidden]; the one of step j at base t has read tokens up
        to t + 1 + j and predicts token t + 2 + j. Bases whose tokens lie beyond the text hold no meaning.
        """
        hidden = self.start(features)
        chain: Chain = []
        states = []
        for step in range(steps):
            read = tokens.roll(-1 - step, dims=1)[:, first if step else 0 :]
            hidden = self.advance(F.embedding(read, embedding), hidden, chain, first)
            states.append(hidden)
        return states

    def start(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden state that stands for the target's features before step 0."""
        raise TypeError(f"{type(self).__name__} defines no start()")

    def advance(self, embeds: torch.Tensor, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        """Hidden state after one more token."""
        raise TypeError(f"{type(self).__name__} defines no advance()")

    def logits(self, hidden: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocabulary] of a hidden state; target_head: the target's LM head [vocabulary, hidden]."""
        raise TypeError(f"{type(self).__name__} defines no logits()")


class Eagle3Head(EagleHead):
    """EAGLE-3: three of the target's hidden states, own LM head and final norm."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.captured = recipe.captured
        self.fc = nn.Linear(len(recipe.captured) * recipe.hidden, recipe.hidden, bias=False)
        self.midlayer = Eagle3Layer(recipe.hidden, recipe.intermediate, recipe.heads, recipe.kv_heads)
        self.norm = RMSNorm(recipe.hidden)
        self.lm_head = nn.Linear(recipe.hidden, recipe.vocab_size, bias=False)

    def start(self, features: torch.Tensor) -> torch.Tensor:
        return self.fc(features)

    def advance(self, embeds: torch.Tensor, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        return self.midlayer(embeds, hidden, chain, first)

    def logits(self, hidden: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(hidden))


class Eagle1Head(EagleHead):
    """EAGLE-1: the target's last hidden state, the target's LM head, no norm at either end."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * recipe.hidden, recipe.hidden)
        self.layers = nn.ModuleList([Eagle1Layer(recipe.hidden, recipe.intermediate, recipe.heads, recipe.kv_heads)])

    def start(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def advance(self, embeds: torch.Tensor, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        return self.layers[0](self.fc(torch.cat([embeds, hidden], dim=-1)), chain, first)

    def logits(self, hidden: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, target_head)


def new_head(kind: str, recipe: Recipe, target: LlamaForCausalLM) -> EagleHead:
    """An untrained head of kind eagle3 or eagle1, fp32; an EAGLE-3 head starts with the target's LM head and norm."""
    torch.manual_seed(recipe.seed + {"eagle3": 2, "eagle1": 3}[kind])
    if kind == "eagle1":
        return Eagle1Head(recipe)
    head = Eagle3Head(recipe)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight)
        head.norm.weight.copy_(target.model.norm.weight)
    return head


@torch.no_grad()
def hidden_states(target: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The target's hidden states [batch, length, hidden]: the inputs of layers 0.., then the last after its norm."""
    out: Any = target.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return out.hidden_states


def head_features(head: EagleHead, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What a head reads of the target's hidden states, [batch, length, features]."""
    if head.captured:
        return torch.cat([states[layer] for layer in head.captured], dim=-1)
    return states[-1]
