"""The tensors of a small Llama, or of an EAGLE head, inside those of a big one whose function is the small one's.

The small model lives in the first channels of the residual stream; the others stay zero, but for the last, which holds
a constant. It stands for the small model's RMSNorm epsilon: with d and D channels, epsilons e and E and the constant
c = sqrt(d e - D E), the mean square (S + c^2) / D + E is d / D times S / d + e for every sum of squares S, so that
norms agree when their weights are multiplied by sqrt(d / D). Heads and MLP rows that the small model lacks are
random and written nowhere; columns that only ever meet zeros are random too.

What would write into idle channels has to be zero: o_proj and down_proj but for the small model's corner, a third of
what a target's pass reads, and all of them in idle layers. Zeros are read and multiplied as anything else is, but flip
fewer bits: a GPU at its power limit may clock a little higher than it would with a trained model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from c2t_plugin.errors import ConfigError

# Tiny beside the small model's: what is left of it after the constant has taken the small one's place
BIG_EPS = 1e-12
# Standard deviation of the random weights
NOISE = 0.02
# What the LM head of a token that the small model lacks holds in the constant's channel. There shipped models' final
# norms gave .0034 to .01 on held-out text at 4,096 channels, so that such a token's logit was below -340.
PADDED = -1e5


@dataclass(frozen=True)
class Shape:
    """What a Llama costs: the sizes of its configuration, named as there but for brevity."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{item.name} must be a positive number, got {value!r}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.hidden % self.heads:
            raise ConfigError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads}), for transformers")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Of a checkpoint's config.json."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        return cls(*(config[name] for name in (*names, "head_dim", "intermediate_size", "vocab_size")))

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Weight:
    """One tensor of the big checkpoint. write: fills it; it is zero, or random if `random`, before that."""

    name: str
    shape: tuple[int, ...]
    random: bool = False
    write: Callable[[Tensor], None] = lambda tensor: None
    integer: bool = False

    def make(self, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """The tensor, on the generator's device."""
        tensor = torch.zeros(self.shape, dtype=torch.int64 if self.integer else dtype, device=generator.device)
        if self.random:
            tensor.normal_(0.0, NOISE, generator=generator)
        self.write(tensor)
        return tensor


class Inflation:
    """How one checkpoint is laid into a bigger one.

    small: its tensors by name. inner, outer: the shapes of both. eps: the small model's RMSNorm epsilon.
    Raises ConfigError where the small one does not fit.
    """

    def __init__(self, small: Mapping[str, Tensor], inner: Shape, outer: Shape, eps: float) -> None:
        sizes = ("layers", "kv_heads", "group", "intermediate", "vocab")
        too_small = [name for name in sizes if getattr(outer, name) < getattr(inner, name)]
        if outer.hidden <= inner.hidden:
            too_small.append("hidden")
        if too_small:
            pairs = ", ".join(f"{name} {getattr(outer, name)} for {getattr(inner, name)}" for name in too_small)
            raise ConfigError(f"the small model does not fit into the shape: {pairs}; hidden needs one channel more")
        if outer.head_dim % inner.head_dim:
            raise ConfigError(f"head_dim must be a multiple of {inner.head_dim}, got {outer.head_dim}")
        self.small, self.inner, self.outer = small, inner, outer
        self.constant = math.sqrt(inner.hidden * eps - outer.hidden * BIG_EPS)
        self.ratio = outer.head_dim // inner.head_dim

    def places(self, kv_head: bool, rotary: bool) -> Tensor:
        """For every element of the small model's heads, in order: its place among the big one's.

        rotary: small pair i, of dimensions i and i + head_dim / 2, goes to the big pair of the same frequency.
        """
        inner, outer = self.inner, self.outer
        half = torch.arange(inner.head_dim // 2) * self.ratio
        dims = torch.cat([half, half + outer.head_dim // 2]) if rotary else torch.arange(inner.head_dim)
        kv = torch.arange(inner.kv_heads)
        heads = kv if kv_head else (kv[:, None] * outer.group + torch.arange(inner.group)).flatten()
        return (heads[:, None] * outer.head_dim + dims).flatten()

    def reads(
        self, name: str, rows: int, at: Tensor, *, scale: float = 1.0, silent: Tensor | None = None, blocks: int = 1
    ) -> Weight:
        """A matrix that reads the residual stream (`blocks` of them beside each other): small row i goes to row at[i].

        silent: rows that must give zero. Neither these nor the small rows see the constant; all else is random.
        """
        d, big = self.inner.hidden, self.outer.hidden
        value = self.small[name]

        def write(tensor: Tensor) -> None:
            quiet = at if silent is None else torch.cat([at, silent])
            quiet = quiet.to(tensor.device)
            for block in range(blocks):
                tensor[quiet, block * big + big - 1] = 0.0
                tensor[quiet, block * big : block * big + d] = 0.0
                part = value[:, block * d : block * d + d].float() * scale
                tensor[at.to(tensor.device), block * big : block * big + d] = part.to(tensor.device, tensor.dtype)

        return Weight(name, (rows, blocks * big), random=True, write=write)

    def writes(self, name: str, columns: int, at: Tensor) -> Weight:
        """A matrix that adds to the residual stream: small column i is column at[i]; all else is zero."""

        def write(tensor: Tensor) -> None:
            d = self.inner.hidden
            tensor[:d, at.to(tensor.device)] = self.small[name].to(tensor.device, tensor.dtype)

        return Weight(name, (self.outer.hidden, columns), write=write)

    def norm(self, name: str, last: float = 0.0) -> Weight:
        """A norm's weights. last: of the constant's channel."""

        def write(tensor: Tensor) -> None:
            d = self.inner.hidden
            tensor[:d] = (self.small[name].float() * math.sqrt(d / self.outer.hidden)).to(tensor.device, tensor.dtype)
            tensor[-1] = last

        return Weight(name, (self.outer.hidden,), write=write)

    def embedding(self, name: str) -> Weight:
        """The small model's tokens first; all hold the constant, and nothing else where the small model has nothing."""
        return Weight(name, (self.outer.vocab, self.outer.hidden), write=self._rows(name, self.constant, self.constant))

    def lm_head(self, name: str, rows: int, source: str | None = None) -> Weight:
        """The small model's tokens first. Channels that it lacks are random: the norm before leaves them 0.

        source: name of the small tensor if it is another.
        """
        return Weight(name, (rows, self.outer.hidden), random=True, write=self._rows(source or name, 0.0, PADDED))

    def _rows(self, source: str, known: float, padded: float) -> Callable[[Tensor], None]:
        """known, padded: what the small model's tokens and all others hold in the constant's channel."""
        value = self.small[source]

        def write(tensor: Tensor) -> None:
            tensor[:, : self.inner.hidden] = 0.0
            tensor[: len(value), : self.inner.hidden] = value.to(tensor.device, tensor.dtype)
            tensor[:, -1] = padded
            tensor[: len(value), -1] = known

        return write

    def attention(self, prefix: str, blocks: int = 1) -> Iterator[Weight]:
        """The four matrices of an attention that reads `blocks` residual streams."""
        outer = self.outer
        queries, keys = outer.heads * outer.head_dim, outer.kv_heads * outer.head_dim
        rotated = self.places(kv_head=False, rotary=True)
        whole = self.places(kv_head=False, rotary=False) // outer.head_dim
        every = (whole.unique()[:, None] * outer.head_dim + torch.arange(outer.head_dim)).flatten()
        silent = every[~torch.isin(every, rotated)]
        # the softmax divides by the root of the big head's size
        scale = math.sqrt(self.ratio)
        yield self.reads(f"{prefix}q_proj.weight", queries, rotated, scale=scale, silent=silent, blocks=blocks)
        yield self.reads(f"{prefix}k_proj.weight", keys, self.places(kv_head=True, rotary=True), blocks=blocks)
        yield self.reads(f"{prefix}v_proj.weight", keys, self.places(kv_head=True, rotary=False), blocks=blocks)
        yield self.writes(f"{prefix}o_proj.weight", queries, self.places(kv_head=False, rotary=False))

    def mlp(self, prefix: str) -> Iterator[Weight]:
        """The three matrices of a gated MLP."""
        at, size = torch.arange(self.inner.intermediate), self.outer.intermediate
        yield self.reads(f"{prefix}gate_proj.weight", size, at)
        yield self.reads(f"{prefix}up_proj.weight", size, at)
        yield self.writes(f"{prefix}down_proj.weight", size, at)

    def layer(self, prefix: str, norms: Sequence[str], blocks: int = 1) -> Iterator[Weight]:
        """A decoder layer of the small model."""
        for norm in norms:
            yield self.norm(f"{prefix}{norm}.weight")
        yield from self.attention(f"{prefix}self_attn.", blocks)
        yield from self.mlp(f"{prefix}mlp.")


def _ones(tensor: Tensor) -> None:
    tensor.fill_(1.0)


def idle_layer(prefix: str, shape: Shape) -> Iterator[Weight]:
    """A layer that computes on random weights and adds nothing."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Weight(f"{prefix}{norm}.weight", (hidden,), write=_ones)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield Weight(f"{prefix}self_attn.{name}_proj.weight", (rows, hidden), random=True)
    yield Weight(f"{prefix}self_attn.o_proj.weight", (hidden, queries))
    for name in ("gate", "up"):
        yield Weight(f"{prefix}mlp.{name}_proj.weight", (shape.intermediate, hidden), random=True)
    yield Weight(f"{prefix}mlp.down_proj.weight", (hidden, shape.intermediate))


def llama(inflation: Inflation) -> Iterator[Weight]:
    """A target, or a stand-alone draft, whose LM head is written even if the small one's is its embedding."""
    outer, head = inflation.outer, "lm_head.weight"
    embedding = "model.embed_tokens.weight"
    yield inflation.embedding(embedding)
    for layer in range(outer.layers):
        prefix = f"model.layers.{layer}."
        if layer < inflation.inner.layers:
            yield from inflation.layer(prefix, ("input_layernorm", "post_attention_layernorm"))
        else:
            yield from idle_layer(prefix, outer)
    yield inflation.norm("model.norm.weight", last=1.0)
    source = head if head in inflation.small else embedding
    yield inflation.lm_head(head, outer.vocab, source=source)


def eagle3(inflation: Inflation, draft_vocab: int) -> Iterator[Weight]:
    """An EAGLE-3 head. draft_vocab: its tokens, those of the small head first; the others are the target's of the same
    number, and have no chance."""
    yield _fuse(inflation, blocks=3, source=2)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    yield from inflation.layer("midlayer.", norms, blocks=2)
    yield inflation.norm("norm.weight", last=1.0)
    yield inflation.lm_head("lm_head.weight", draft_vocab)
    known = inflation.small.get("d2t", torch.zeros(0, dtype=torch.int64))
    if len(known) or draft_vocab < inflation.outer.vocab:

        def write(tensor: Tensor) -> None:
            tensor[: len(known)] = known.to(tensor.device)

        # the distance of every draft token from its number in the target's vocabulary
        yield Weight("d2t", (draft_vocab,), integer=True, write=write)


def eagle1(inflation: Inflation) -> Iterator[Weight]:
    """An EAGLE-1 head, which has no norm at either end; embedding and LM head are the target's."""
    yield _fuse(inflation, blocks=2, source=0)
    bias = inflation.small["fc.bias"]

    def write(tensor: Tensor) -> None:
        tensor[: len(bias)] = bias.to(tensor.device, tensor.dtype)

    yield Weight("fc.bias", (inflation.outer.hidden,), write=write)
    yield from inflation.layer("layers.0.", ("post_attention_layernorm",))


def _fuse(inflation: Inflation, blocks: int, source: int) -> Weight:
    """The head's input projection. The constant comes from the stream `source`, where it was not normed."""
    d, big = inflation.inner.hidden, inflation.outer.hidden
    whole = inflation.reads("fc.weight", big, torch.arange(d), silent=torch.arange(d, big), blocks=blocks)

    def write(tensor: Tensor) -> None:
        whole.write(tensor)
        tensor[big - 1, source * big + big - 1] = 1.0

    return Weight("fc.weight", whole.shape, random=True, write=write)
