"""The drafts of a pair as Drafter: many decoding states of the same texts, many branches each.

Slot i of a draft's memory holds the text's token i + 1, at position i, as in SGLang: its drafts never read the first
token. A head reads the target's hidden state of token i beside it, and below the root its own hidden states.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.grow import Drafter, LogitDistributions
from c2t_plugin.lab.heads import EagleHead, head_features, hidden_states
from c2t_plugin.lab.layers import ChainAttention


@dataclass
class Layer:
    """Where the nodes now being read sit, shared by all attention layers of a draft.

    visible: (texts, states, slots) bool, the slots of a text that each of its states has. ancestors:
    (texts, states, branches, nodes read) bool, self included. cos, sin: (texts, states, 1, branches, head_dim).
    """

    visible: Tensor
    ancestors: Tensor
    cos: Tensor
    sin: Tensor


@dataclass
class Memory:
    """Keys and values of one attention layer, rotated: those of the texts, (texts, heads, slots, head_dim) each, and,
    after every layer of nodes, theirs: (texts, states, heads, branches, head_dim) each."""

    text_keys: Tensor
    text_values: Tensor
    layer: Layer
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class TreeAttention(nn.Module):
    """Attention of tree nodes to their text and to their ancestors, over another attention module's projections."""

    def __init__(self, source: Any, head_dim: int) -> None:
        """source: has q_proj, k_proj, v_proj and o_proj, as the attention of transformers' Llama and of the heads."""
        super().__init__()
        self.q_proj: nn.Linear = source.q_proj
        self.k_proj: nn.Linear = source.k_proj
        self.v_proj: nn.Linear = source.v_proj
        self.o_proj: nn.Linear = source.o_proj
        self.head_dim = head_dim

    def forward(self, x: Tensor, memory: Memory, first: int = 0) -> Tensor:
        """x: (texts, states, branches, input) -> (texts, states, branches, hidden); its keys enter the memory.

        first: of the attention whose place this takes in a head; there is nothing to leave out here.
        """
        layer = memory.layer
        q = _rotate(self._split(self.q_proj(x)), layer.cos, layer.sin)
        repeat = q.shape[2] * self.head_dim // self.k_proj.out_features
        k = _rotate(self._split(self.k_proj(x)), layer.cos, layer.sin)
        memory.keys.append(k.repeat_interleave(repeat, dim=2))
        memory.values.append(self._split(self.v_proj(x)).repeat_interleave(repeat, dim=2))
        out = _attend(q, memory, torch.cat(memory.keys, dim=3), torch.cat(memory.values, dim=3))
        return self.o_proj(out.transpose(2, 3).flatten(3))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(2, 3)


def _attend(q: Tensor, memory: Memory, keys: Tensor, values: Tensor) -> Tensor:
    """q: (texts, states, heads, branches, head_dim); keys, values: the nodes'. Returns the shape of q."""
    states, branches, slots = q.shape[1], q.shape[3], memory.text_keys.shape[2]
    # All states of a text share its keys, so they are one matrix product.
    by_text = q.transpose(1, 2).flatten(2, 3)
    text = (by_text @ memory.text_keys.transpose(-1, -2)).unflatten(2, (states, branches)).transpose(1, 2)
    text = text.masked_fill(~memory.layer.visible[:, :, None, None], -torch.inf)
    own = (q @ keys.transpose(-1, -2)).masked_fill(~memory.layer.ancestors[:, :, None], -torch.inf)
    weights = torch.cat([text, own], dim=-1).mul_(q.shape[-1] ** -0.5).softmax(-1)
    from_text = weights[..., :slots].transpose(1, 2).flatten(2, 3) @ memory.text_values
    return from_text.unflatten(2, (states, branches)).transpose(1, 2) + weights[..., slots:] @ values


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class ReadTexts(Protocol):
    """A draft that has read some texts and stands at several states of each; rows are text by text."""

    def start(self, layers: int) -> Drafter:
        """Begin anew below the roots, for nodes of depth at most `layers`; what was read of the texts is shared."""


class DraftModel(Protocol):
    """A draft of any kind."""

    def at(self, token_ids: Tensor, roots: range) -> ReadTexts:
        """Read texts of one length. token_ids: (texts, length) int64; tokens after the last root are not looked at.
        roots: indices of the root tokens, from 1 on, one state each, consecutive."""


class TreeDraft(Protocol):
    """What the pair's three kinds of draft have in common: attention that reads many branches at once."""

    def at(self, token_ids: Tensor, roots: range) -> ReadTexts:
        """As DraftModel.at."""
        return BatchDraft(self, token_ids, roots)

    def read_text(self, token_ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Read whole texts but for their first tokens: (texts, 1 + slots) int64.

        Returns the draft's hidden states (texts, slots, size) and per attention layer the rotated keys and values.
        """

    def read_nodes(self, token_ids: Tensor, hidden: Tensor, memories: list[Memory]) -> Tensor:
        """Hidden states (..., size) of nodes (...) from their tokens and their parents' hidden states."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., size) -> (..., vocab)."""

    def rotary(self, slots: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine (slots, head_dim) of the positions from 0 on."""


class StandaloneDraft(TreeDraft):
    """A Llama of its own; it does not look at the target's hidden states."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        layers: Any = model.model.layers
        self.attentions = [TreeAttention(layer.self_attn, layer.self_attn.head_dim) for layer in layers]

    def read_text(self, token_ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        out = self.model.model(input_ids=token_ids[:, 1:], use_cache=True)
        attention: Any = self.model.model.layers[0].self_attn
        repeat = attention.num_key_value_groups
        wide = [
            (layer.keys.repeat_interleave(repeat, dim=1), layer.values.repeat_interleave(repeat, dim=1))
            for layer in out.past_key_values.layers
        ]
        return out.last_hidden_state, wide

    def read_nodes(self, token_ids: Tensor, hidden: Tensor, memories: list[Memory]) -> Tensor:
        x = self.model.model.embed_tokens(token_ids)
        for layer, attention, memory in zip(self.model.model.layers, self.attentions, memories, strict=True):
            x = x + attention(layer.input_layernorm(x), memory)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)

    def rotary(self, slots: int) -> tuple[Tensor, Tensor]:
        return _rotary(self.model, slots)


class HeadDraft(TreeDraft):
    """An EAGLE-3, EAGLE-1 or MTP head on the target's embedding."""

    def __init__(self, head: EagleHead, target: PreTrainedModel, token_ids: Tensor | None = None) -> None:
        """token_ids: (draft_vocab,) int64, the target's id of each token of the head; None where they are the same."""
        self.head, self.target, self.token_ids = head, target, token_ids
        embedding: Any = target.get_input_embeddings()
        lm_head: Any = target.get_output_embeddings()
        self.embedding, self.lm_head = embedding.weight, lm_head.weight
        # The same weights with another attention: the head's own reads chains along a text only.
        self.node_head: Any = copy.deepcopy(head)
        for name, module in list(self.node_head.named_modules()):
            if isinstance(module, ChainAttention):
                self.rates: Any = module.rates
                self.node_head.set_submodule(name, TreeAttention(module, module.head_dim))

    def read_text(self, token_ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        chain: list[tuple[Tensor, Tensor]] = []
        features = self.head.start(head_features(self.head, hidden_states(self.target, token_ids[:, :-1])))
        return self.head.advance(F.embedding(token_ids[:, 1:], self.embedding), features, chain, 0), chain

    def read_nodes(self, token_ids: Tensor, hidden: Tensor, memories: list[Memory]) -> Tensor:
        # A head has one layer and hands its memory through unread.
        return self.node_head.advance(F.embedding(token_ids, self.embedding), hidden, memories[0], 0)

    def logits(self, hidden: Tensor) -> Tensor:
        own = self.head.logits(hidden, self.lm_head)
        if self.token_ids is None:
            return own
        # a token that the head does not have is impossible
        return own.new_full((*own.shape[:-1], len(self.lm_head)), -torch.inf).index_copy_(-1, self.token_ids, own)

    def rotary(self, slots: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(slots).float()[:, None] * self.rates
        return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def _rotary(model: LlamaForCausalLM, slots: int) -> tuple[Tensor, Tensor]:
    cos, sin = model.model.rotary_emb(model.lm_head.weight, torch.arange(slots)[None])
    return cos[0], sin[0]


class BatchDraft:
    """A TreeDraft as ReadTexts."""

    def __init__(self, model: TreeDraft, token_ids: Tensor, roots: range) -> None:
        """Arguments as of DraftModel.at."""
        self.model, self.texts, self.roots = model, len(token_ids), roots
        hidden, self.text_memory = model.read_text(token_ids[:, : roots[-1] + 1])
        # The slot that holds the root is one before the root's index.
        self.hidden = hidden[:, roots[0] - 1 : roots[-1], None]
        self.rows = self.texts * len(roots)

    def start(self, layers: int) -> Growth:
        """As ReadTexts.start."""
        return Growth(self, layers)


class Growth:
    """One tree per state on its way: a Drafter."""

    def __init__(self, batch: BatchDraft, layers: int) -> None:
        self.batch, self.model = batch, batch.model
        self.cos, self.sin = self.model.rotary(batch.roots[-1] + layers)
        texts, states, slots = batch.texts, len(batch.roots), batch.text_memory[0][0].shape[2]
        # Of all nodes read so far, the root first: (texts, states, 1 + nodes, ...). The root is nobody's ancestor here,
        # since it belongs to the text.
        self.hidden = batch.hidden
        self.positions = (torch.tensor(list(batch.roots)) - 1).expand(texts, -1)[..., None]
        self.ancestors = torch.zeros(texts, states, 1, 0, dtype=torch.bool)
        visible = torch.arange(slots) < self.positions + 1
        self.layer = Layer(visible, self.ancestors, self.cos, self.sin)
        self.memories = [Memory(keys, values, self.layer) for keys, values in batch.text_memory]

    def root(self) -> LogitDistributions:
        return LogitDistributions(self.model.logits(self.hidden).flatten(0, 1))

    def extend(self, token_ids: Tensor, parents: Tensor) -> LogitDistributions:
        shape = (self.batch.texts, len(self.batch.roots), -1)
        parents = parents.view(shape) + 1
        branches = parents.shape[2]
        inherited = self.ancestors.take_along_dim(parents[..., None], dim=2)
        itself = torch.eye(branches, dtype=torch.bool).expand(*inherited.shape[:2], -1, -1)
        self.layer.ancestors = torch.cat([inherited, itself], dim=-1)
        self.ancestors = torch.cat([F.pad(self.ancestors, (0, branches)), self.layer.ancestors], dim=2)
        at = self.positions.take_along_dim(parents, dim=2) + 1
        if int(at.max()) >= len(self.cos):
            raise C2TError("a node is deeper than the layers that the draft was started for; start it for more")
        self.positions = torch.cat([self.positions, at], dim=2)
        self.layer.cos, self.layer.sin = self.cos[at][:, :, None], self.sin[at][:, :, None]
        hidden = self.hidden.take_along_dim(parents[..., None], dim=2)
        hidden = self.model.read_nodes(token_ids.view(shape), hidden, self.memories)
        self.hidden = torch.cat([self.hidden, hidden], dim=2)
        return LogitDistributions(self.model.logits(hidden).flatten(0, 1))
