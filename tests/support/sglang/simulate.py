"""Speculative decoding with a greedy chain, simulated with transformers and plain torch, as an oracle for servers.

Nothing here comes from SGLang or from our package. The simulation has no KV cache: each step runs target and draft
anew over all committed tokens, which is what SGLang's caches have to amount to. Shapes: n committed tokens, k drafted
ones, V words in the vocabulary, F the width of what a draft receives from the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, silu
from transformers import LlamaForCausalLM

# Drafts kept, of those whose logits rows [k, V] it is given: 0 to k.
KeepLength = Callable[[torch.Tensor], int]
# The front of a draft that may be verified behind committed tokens.
Valid = Callable[[list[int], list[int]], list[int]]


class Draft(Protocol):
    """A draft model: greedy chains from the committed tokens and the target's features at each of them."""

    def features(self, states: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """What the draft gets from the target's hidden states (embeddings, then each layer's output, the last one
        after the final norm; all [n, hidden]): [n, F], or None."""

    def chain(self, tokens: Sequence[int], features: torch.Tensor | None, length: int) -> torch.Tensor:
        """Logits [length, V]; each row's argmax is the drafted token that the next row has seen."""


@dataclass
class Simulation:
    """One request. A verify step commits its accepted drafts and one token of the target, the bonus."""

    output_ids: list[int]
    verify_count: int = 0
    draft_lengths: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    """Accepted drafts of each verify step, without the bonus."""


class Target:
    """The target in float32: greedy choices and hidden states at every position."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.no_grad()
    def scores(self, tokens: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [n, V], and the hidden states (embeddings first, the last one normed), [n, hidden]."""
        out = self.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        return out.logits[0], [state[0] for state in out.hidden_states]

    def run(self, tokens: Sequence[int]) -> tuple[list[int], list[torch.Tensor]]:
        """The choice after each token, and the hidden states, as `scores` has them."""
        logits, states = self.scores(tokens)
        return logits.argmax(-1).tolist(), states

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """Plain decoding, one token at a time (the one place with a KV cache, transformers' own)."""
        found: list[int] = []
        unseen, cache = list(prompt), None
        while len(found) < new_tokens:
            out = self.model(torch.tensor([unseen]), past_key_values=cache, use_cache=True)
            unseen, cache = [int(out.logits[0, -1].argmax())], out.past_key_values
            found += unseen
        return found


class Text:
    """The target along one prompt and plain decoding's output, run once: what it makes of the front of a text does not
    change with what follows."""

    def __init__(self, target: Target, prompt: Sequence[int], new_tokens: int) -> None:
        """new_tokens: of the output, no fewer than a simulation of it asks about."""
        self._tokens = [*prompt, *target.greedy(prompt, new_tokens)]
        self._choices, self._states = target.run(self._tokens)
        assert self._choices[len(prompt) - 1 : -1] == self._tokens[len(prompt) :], "a tie: choose another prompt"

    def run(self, tokens: Sequence[int]) -> tuple[list[int], list[torch.Tensor]]:
        """As Target.run, up to the last token before the first that plain decoding has not: its choice is another."""
        assert len(tokens) < len(self._tokens), "the text is too short"
        same = next((at for at, token in enumerate(tokens) if token != self._tokens[at]), len(tokens))
        return self._choices[:same], [state[:same] for state in self._states]


def simulate(
    target: Target | Text,
    draft: Draft,
    prompt: Sequence[int],
    new_tokens: int,
    chain_length: int,
    keep_length: KeepLength | None = None,
    valid: Valid | None = None,
) -> Simulation:
    """Decode until `new_tokens` are out, end-of-text or not; `keep_length` may cut each step's chain, then `valid`."""
    choices, states = target.run(prompt)
    committed = [*prompt, choices[-1]]
    result = Simulation(output_ids=[])
    while len(committed) - len(prompt) < new_tokens:
        # the newest token has not been through the target, so there are features for all but it
        n = len(committed) - 1
        features = draft.features([state[:n] for state in states])
        logits = draft.chain(committed, features, chain_length)
        kept = chain_length if keep_length is None else keep_length(logits)
        drafted = logits.argmax(-1).tolist()[:kept]
        if valid is not None:
            drafted = valid(committed, drafted)
        choices, states = target.run([*committed, *drafted])
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == choices[n + accepted]:
            accepted += 1
        committed += [*drafted[:accepted], choices[n + accepted]]
        result.verify_count += 1
        result.draft_lengths.append(len(drafted))
        result.accept_lengths.append(accepted)
    result.output_ids = committed[len(prompt) :][:new_tokens]
    return result


class StandaloneDraft:
    """A small language model. SGLang shifts its input by one, as for EAGLE, so it never sees the first token."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def features(self, states: Sequence[torch.Tensor]) -> None:
        return None

    @torch.no_grad()
    def chain(self, tokens: Sequence[int], features: torch.Tensor | None, length: int) -> torch.Tensor:
        seen, rows = list(tokens[1:]), []
        for _ in range(length):
            rows.append(self.model(torch.tensor([seen]), use_cache=False).logits[0, -1])
            seen.append(int(rows[-1].argmax()))
        return torch.stack(rows)


class EagleHead:
    """What EAGLE and EAGLE-3 share: entry i holds token i + 1 and the target's features of token i, at position i.

    A drafted token's entry takes the head's own state of the entry before it in place of features.
    """

    def __init__(self, checkpoint: Path, target: Target) -> None:
        self.weights = {name: w.float() for name, w in load_file(checkpoint / "model.safetensors").items()}
        self.config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
        self.embedding = target.model.get_input_embeddings().weight.detach()
        self.target_head = target.model.get_output_embeddings().weight.detach()

    def chain(self, tokens: Sequence[int], features: torch.Tensor | None, length: int) -> torch.Tensor:
        assert features is not None
        hidden, ids, rows = self.project(features), list(tokens[1:]), []
        for _ in range(length):
            state = self.layer(self.embedding[torch.tensor(ids)], hidden)
            rows.append(self.logits(state[-1]))
            ids.append(int(rows[-1].argmax()))
            hidden = torch.cat([hidden, state[-1:]])
        return torch.stack(rows)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Features [n, F] to the head's width [n, hidden]."""
        raise AssertionError("a subclass has it")

    def layer(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The decoder layer over all entries: state [n, hidden], the residual sum before any final norm."""
        raise AssertionError("a subclass has it")

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a subclass has it")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up, down = (self.weights[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    def attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        """Causal attention of x [n, width] over itself, with rotary positions 0 to n - 1."""
        q, k, v = (self._heads(linear(x, self.weights[f"{prefix}.self_attn.{name}_proj.weight"])) for name in "qkv")
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = self._rotate(q) @ self._rotate(k).transpose(1, 2) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return linear(mixed.transpose(0, 1).reshape(len(x), -1), self.weights[f"{prefix}.self_attn.o_proj.weight"])

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self.config["head_dim"]).transpose(0, 1)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of x [heads, n, D], which pairs component i with i + D / 2."""
        half = x.shape[-1] // 2
        frequency = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angle = torch.arange(x.shape[1])[:, None] * frequency
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
        )


class Eagle3Draft(EagleHead):
    """EAGLE-3: features of three layers, embedding and hidden state normed side by side, an output head of its own."""

    def features(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        # SGLang captures what layer `id` hands on; states[0] are the embeddings
        return torch.cat([states[layer + 1] for layer in layers], dim=-1)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        return linear(features, self.weights["fc.weight"])

    def layer(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        both = [self.norm(embeds, "midlayer.input_layernorm"), self.norm(hidden, "midlayer.hidden_norm")]
        mid = hidden + self.attention(torch.cat(both, dim=-1), "midlayer")
        return mid + self.mlp(self.norm(mid, "midlayer.post_attention_layernorm"), "midlayer")

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return linear(self.norm(state, "norm"), self.weights["lm_head.weight"])


class Eagle1Draft(EagleHead):
    """EAGLE: the target's last hidden state (after its final norm) and the target's output head."""

    def features(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        return states[-1]

    def project(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def layer(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        # no input norm: the first layer of an EAGLE head has none
        x = linear(torch.cat([embeds, hidden], dim=-1), self.weights["fc.weight"], self.weights["fc.bias"])
        mid = x + self.attention(x, "layers.0")
        return mid + self.mlp(self.norm(mid, "layers.0.post_attention_layernorm"), "layers.0")

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return linear(state, self.target_head)


class MtpDraft(EagleHead):
    """MiMo's MTP layer, from the checkpoint that holds target and layer: the target's last hidden state and output
    head; what a step hands on has been through its final norm."""

    prefix = "model.mtp_layers.0"

    def features(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        return states[-1]

    def project(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def layer(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        # the engine blanks the embedding of the entry at position 0
        embeds = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
        both = [
            self.norm(hidden, f"{self.prefix}.hidden_layernorm"),
            self.norm(embeds, f"{self.prefix}.token_layernorm"),
        ]
        x = linear(torch.cat(both, dim=-1), self.weights[f"{self.prefix}.input_proj.weight"])
        mid = x + self.attention(self.norm(x, f"{self.prefix}.input_layernorm"), self.prefix)
        out = mid + self.mlp(self.norm(mid, f"{self.prefix}.post_attention_layernorm"), self.prefix)
        return self.norm(out, f"{self.prefix}.final_layernorm")

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return linear(state, self.target_head)


def load_draft(pair: Path, kind: str, target: Target) -> Draft:
    """The draft in the directory `kind` of a pair: draft, eagle3 or eagle1."""
    if kind == "draft":
        return StandaloneDraft(pair / kind)
    heads: dict[str, type[Eagle3Draft | Eagle1Draft]] = {"eagle3": Eagle3Draft, "eagle1": Eagle1Draft}
    return heads[kind](pair / kind, target)
