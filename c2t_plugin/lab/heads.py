"""Draft heads in torch: EAGLE-3, EAGLE-1 and MTP.

They compute what SGLang's LlamaForCausalLMEagle3, LlamaForCausalLMEagle and MiMoMTP compute from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from c2t_plugin.lab.layers import RMS_EPS, Chain, ChainAttention, GatedMLP, RMSNorm


@dataclass(frozen=True, eq=False)
class HeadShape:
    """What a head is built from. vocab: tokens that it chooses from.

    rates: rotary angle per position of each pair of dimensions, (head_dim / 2,) float32. captured: target layers whose
    inputs it reads (EAGLE-3). eps: of its norms.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    rates: torch.Tensor
    captured: tuple[int, ...] = ()
    eps: float = RMS_EPS

    def norm(self) -> RMSNorm:
        return RMSNorm(self.hidden, self.eps)

    def attention(self, inputs: int = 1) -> ChainAttention:
        """inputs: vectors of `hidden` that it reads beside each other."""
        return ChainAttention(inputs * self.hidden, self.hidden, self.heads, self.kv_heads, self.rates)

    def mlp(self) -> GatedMLP:
        return GatedMLP(self.hidden, self.intermediate)


class Eagle3Layer(nn.Module):
    """The decoder layer of an EAGLE-3 head: attention reads the embedding beside the hidden state."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = shape.attention(2)
        self.mlp = shape.mlp()
        self.input_layernorm = shape.norm()
        self.hidden_norm = shape.norm()
        self.post_attention_layernorm = shape.norm()

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        attended = self.self_attn(both, chain, first)
        hidden = hidden[:, -attended.shape[1] :] + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle1Layer(nn.Module):
    """The decoder layer of an EAGLE-1 head: Llama's without the first norm."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = shape.attention()
        self.mlp = shape.mlp()
        self.post_attention_layernorm = shape.norm()

    def forward(self, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        attended = self.self_attn(hidden, chain, first)
        hidden = hidden[:, -attended.shape[1] :] + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """Common part of the heads; the embedding is the target's and not a parameter here.

    captured: the target's layers whose inputs are the features (EAGLE-3), empty for the others, whose feature is the
    target's hidden state after its final norm. regresses: whether training also pulls the output towards that state.
    """

    captured: tuple[int, ...] = ()
    regresses = False

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

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.captured = shape.captured
        self.fc = nn.Linear(len(shape.captured) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = shape.norm()
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def start(self, features: torch.Tensor) -> torch.Tensor:
        return self.fc(features)

    def advance(self, embeds: torch.Tensor, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        return self.midlayer(embeds, hidden, chain, first)

    def logits(self, hidden: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(hidden))


class Eagle1Head(EagleHead):
    """EAGLE-1: the target's last hidden state, the target's LM head, no norm at either end."""

    regresses = True

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden)
        self.layers = nn.ModuleList([Eagle1Layer(shape)])

    def start(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def advance(self, embeds: torch.Tensor, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        return self.layers[0](self.fc(torch.cat([embeds, hidden], dim=-1)), chain, first)

    def logits(self, hidden: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, target_head)


class MtpHead(EagleHead):
    """MiMo's multi-token prediction: the target's last hidden state and LM head, one whole Llama layer.

    Normalised hidden state and normalised embedding are concatenated and projected; the final norm's output is both
    what the LM head reads and what the next step continues from.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.token_layernorm = shape.norm()
        self.hidden_layernorm = shape.norm()
        self.input_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.input_layernorm = shape.norm()
        self.self_attn = shape.attention()
        self.post_attention_layernorm = shape.norm()
        self.mlp = shape.mlp()
        self.final_layernorm = shape.norm()

    def start(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def advance(self, embeds: torch.Tensor, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        if not chain:
            # The engines blank the embedding at position 0, which only the text's pass holds.
            embeds = F.pad(embeds[:, 1:], (0, 0, 1, 0))
        x = self.input_proj(torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeds)], dim=-1))
        attended = self.self_attn(self.input_layernorm(x), chain, first)
        x = x[:, -attended.shape[1] :] + attended
        return self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))

    def logits(self, hidden: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, target_head)


HEADS: dict[str, Callable[[HeadShape], EagleHead]] = {"eagle3": Eagle3Head, "eagle1": Eagle1Head, "mtp": MtpHead}


@torch.no_grad()
def hidden_states(target: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The target's hidden states [batch, length, hidden]: the inputs of layers 0.., then the last after its norm."""
    out: Any = target.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return out.hidden_states


def head_features(head: EagleHead, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What a head reads of the target's hidden states, [batch, length, features]."""
    if head.captured:
        return torch.cat([states[layer] for layer in head.captured], dim=-1)
    return states[-1]
