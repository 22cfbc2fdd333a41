"""An EAGLE head computed from its checkpoint alone: what the tests of inflated heads judge by."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from c2t_plugin.lab.heads import hidden_states


def weights_in(directory: Path) -> dict[str, Tensor]:
    """Of a checkpoint in one file or in several."""
    return {name: value for path in directory.glob("model*.safetensors") for name, value in load_file(path).items()}


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotated(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of (batch, heads, positions, head_dim)."""
    size = x.shape[-1]
    angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


class Head:
    """The layer of an EAGLE head by its checkpoint alone, over the positions of a text."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = {name: value.float() for name, value in weights_in(directory).items()}

    def __call__(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Hidden states after one step; hidden: the target's features, or those of the step before."""
        weights, eps = self.weights, self.config["rms_norm_eps"]
        eagle3 = "norm.weight" in weights
        layer = "midlayer." if eagle3 else "layers.0."
        if not eagle3:
            hidden = F.linear(torch.cat([embeds, hidden], -1), weights["fc.weight"], weights["fc.bias"])
            read = hidden
        else:
            if hidden.shape[-1] != embeds.shape[-1]:
                hidden = F.linear(hidden, weights["fc.weight"])
            words = norm(embeds, weights[f"{layer}input_layernorm.weight"], eps)
            read = torch.cat([words, norm(hidden, weights[f"{layer}hidden_norm.weight"], eps)], -1)
        hidden = hidden + self._attention(read, f"{layer}self_attn.")
        x = norm(hidden, weights[f"{layer}post_attention_layernorm.weight"], eps)
        gate, up, down = (weights[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return hidden + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        config, weights = self.config, self.weights

        def heads(name: str) -> Tensor:
            return F.linear(x, weights[f"{prefix}{name}_proj.weight"]).unflatten(-1, (-1, config["head_dim"]))

        q, k, v = (heads(name).transpose(1, 2) for name in "qkv")
        theta = config["rope_theta"]
        out = F.scaled_dot_product_attention(rotated(q, theta), rotated(k, theta), v, is_causal=True, enable_gqa=True)
        return F.linear(out.transpose(1, 2).flatten(2), weights[f"{prefix}o_proj.weight"])

    def logits(self, hidden: Tensor, target_head: Tensor) -> Tensor:
        if "norm.weight" not in self.weights:
            return F.linear(hidden, target_head)
        return F.linear(
            norm(hidden, self.weights["norm.weight"], self.config["rms_norm_eps"]), self.weights["lm_head.weight"]
        )


@torch.no_grad()
def two_steps(kind: str, directory: Path, target: LlamaForCausalLM, tokens: Tensor) -> list[Tensor]:
    """Logits of two draft steps, the second from the first one's hidden states."""
    head, states = Head(directory / kind), hidden_states(target, tokens)
    captured = head.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    # SGLang's ids are one below the layers whose inputs are read
    hidden = states[-1] if captured is None else torch.cat([states[layer + 1] for layer in captured], -1)
    embeds = target.get_input_embeddings()(tokens)
    found = []
    for _ in range(2):
        hidden = head(embeds, hidden)
        found.append(head.logits(hidden, target.lm_head.weight))
    return found
