"""Parts that the heads are made of; their parameter names are the ones of the checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

RMS_EPS = 1e-5
# keys and values of every draft step so far
Chain = list[tuple[torch.Tensor, torch.Tensor]]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float = RMS_EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class ChainAttention(nn.Module):
    """Attention of a head that drafts a chain from many positions (bases) of a text at once.

    Draft step 0 at base t attends to step 0 at bases <= t. Step j attends to these and to its own chain, steps 1..j
    at base t. Keys carry their rotary position: base t, step j sits at position t + j.
    """

    def __init__(self, input_size: int, hidden: int, heads: int, kv_heads: int, rates: torch.Tensor) -> None:
        """rates: rotary angle per position of each pair of dimensions; half as many as a head has dimensions."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, 2 * len(rates)
        self.register_buffer("rates", rates, persistent=False)
        self.q_proj = nn.Linear(input_size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        """x: [batch, positions, input_size] of step len(chain); its keys and values are appended to chain.

        Step 0 gets all positions of the text and answers for bases from `first` on; later steps get these bases only.
        Returns [batch, bases, hidden].
        """
        step = len(chain)
        start = first if step else 0
        repeat = self.heads // self.kv_heads
        k = self._rotate(self._split(self.k_proj(x), self.kv_heads), start + step).repeat_interleave(repeat, dim=1)
        v = self._split(self.v_proj(x), self.kv_heads).repeat_interleave(repeat, dim=1)
        chain.append((k, v))
        q = self._rotate(self._split(self.q_proj(x[:, first - start :]), self.heads), first + step)
        out = _attend(q, chain, first)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _rotate(self, x: torch.Tensor, offset: int) -> torch.Tensor:
        """Rotary embedding of x [..., positions, head_dim], whose first position is `offset`."""
        rates: Any = self.rates
        angles = (torch.arange(x.shape[-2], device=x.device).float() + offset)[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def _attend(q: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
    """q [batch, heads, bases, head_dim] over the causal step 0 and the chain's own later steps."""
    text_keys, text_values = chain[0]
    length = text_keys.shape[2]
    future = torch.ones(q.shape[2], length, dtype=torch.bool, device=q.device).triu(1 + first)
    text = (q @ text_keys.transpose(-1, -2)).float().masked_fill(future, float("-inf"))
    own = [(q * k).sum(-1, keepdim=True).float() for k, _ in chain[1:]]
    weights = torch.cat([text, *own], dim=-1).mul(q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
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
