"""The EAGLE-3 head over SmolLM2: its shape, how it starts, what it learns, and its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

from benchmarks.pairs.smollm2.batches import Batch
from benchmarks.pairs.smollm2.fused import head_cross_entropy
from benchmarks.pairs.smollm2.states import CAPTURED
from benchmarks.pairs.toy.distil import teacher_targets
from benchmarks.pairs.toy.load import save_weights
from c2t_plugin.lab.heads import Eagle3Layer, EagleHead, HeadShape
from c2t_plugin.lab.layers import Chain

UNROLL = 4
UNROLL_DECAY = 0.8
ARGMAX_WEIGHT = 0.2
# tokens before what a user says, equal in all prompts: nothing is learnt from them
LEAD = 28


def head_shape(config: Any, draft_vocab: int) -> HeadShape:
    """Shape of the head over a target with this transformers configuration."""
    head_dim = config.head_dim
    rates = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    return HeadShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocab=draft_vocab,
        captured=CAPTURED,
        eps=config.rms_norm_eps,
        rates=rates,
    )


class TurnedHead(EagleHead):
    """An EAGLE-3 head whose LM head is rows of the target's, times one trained matrix, `turn`.

    So the shipped weights hold no LM head, and the draft vocabulary may be large.

    vocabulary: its tokens, int64, ascending.
    """

    vocabulary: torch.Tensor
    rows: torch.Tensor

    def __init__(self, shape: HeadShape, vocabulary: torch.Tensor, rows: torch.Tensor) -> None:
        """rows: of the target's LM head, [len(vocabulary), hidden]."""
        super().__init__()
        self.captured = shape.captured
        self.fc = nn.Linear(len(shape.captured) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = shape.norm()
        self.turn = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("rows", rows.detach().bfloat16(), persistent=False)

    def start(self, features: torch.Tensor) -> torch.Tensor:
        return self.fc(features)

    def advance(self, embeds: torch.Tensor, hidden: torch.Tensor, chain: Chain, first: int) -> torch.Tensor:
        return self.midlayer(embeds, hidden, chain, first)

    def known(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the rows are multiplied with, [..., hidden]."""
        return self.turn(self.norm(hidden))

    def logits(self, hidden: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
        return F.linear(self.known(hidden), self.rows.to(self.turn.weight.dtype))


@torch.no_grad()
def new_head(target: LlamaForCausalLM, vocabulary: torch.Tensor, seed: int) -> TurnedHead:
    """An untrained head, fp32, that chooses from `vocabulary`, tokens of the target's.

    The final norm is the target's. The layer is the target's last one, which reads the last captured state.
    """
    torch.manual_seed(seed)
    head = TurnedHead(head_shape(target.config, len(vocabulary)), vocabulary, target.lm_head.weight[vocabulary])
    last, hidden = target.model.layers[-1], target.config.hidden_size
    torch.nn.init.eye_(head.turn.weight)
    head.norm.weight.copy_(target.model.norm.weight)
    head.fc.weight.mul_(0.1)[:, -hidden:] += torch.eye(hidden)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.midlayer.self_attn, name).weight
        weight.mul_(0.5)[:, hidden:] = getattr(last.self_attn, name).weight
    head.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    head.midlayer.mlp.load_state_dict(last.mlp.state_dict())
    head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    return head


def draft_vocabulary(counts: torch.Tensor, size: int, always: tuple[int, ...] = ()) -> torch.Tensor:
    """The `size` tokens with the highest counts [vocabulary], those of `always` among them; int64, ascending."""
    counts = counts.clone()
    counts[list(always)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


class Distillation:
    """The head's loss on batches of own text, over UNROLL draft steps.

    The teacher is the target's distribution among the head's tokens, in answers and in what users say alike; a
    position whose text goes on with another token teaches nothing.
    """

    def __init__(self, head: TurnedHead, target: LlamaForCausalLM) -> None:
        self.head = head
        self.embedding = target.model.embed_tokens.weight.detach().bfloat16()
        self.inside = torch.zeros(target.config.vocab_size, dtype=torch.bool)
        self.inside[head.vocabulary] = True

    def loss(self, batch: Batch, figures: dict[str, float] | None = None) -> torch.Tensor:
        """Mean loss in nats; `figures`, if given, gets the agreement with the teacher by draft step."""
        head, first = self.head, _lead(batch) - 2
        bases = batch.tokens.shape[1] - first - 1
        with torch.autocast("cpu", torch.bfloat16):
            known = batch.known[:, first + 1 :].flatten(0, 1)
            goal = teacher_targets(F.linear(known, head.rows), ARGMAX_WEIGHT)
            total = torch.zeros(())
            for j, drafted in enumerate(head.unroll(self.embedding, batch.tokens, batch.features, UNROLL, first)):
                rows, base = self.usable(batch, first, j).nonzero(as_tuple=True)
                state, picks = head.known(drafted[rows, base]), rows * bases + base + j
                total = total + UNROLL_DECAY**j * head_cross_entropy(state, head.rows, goal, picks)
                if figures is not None:
                    best = F.linear(state, head.rows).argmax(-1)
                    figures[f"agree{j + 1}"] = float((best == goal[picks].argmax(-1)).float().mean())
        return total / sum(UNROLL_DECAY**j for j in range(UNROLL))

    def usable(self, batch: Batch, first: int, j: int) -> torch.Tensor:
        """Bool [rows, bases]: whether step j of a base, from `first` on, has a teacher."""
        position = torch.arange(first + 1 + j, batch.tokens.shape[1])
        follower = self.inside[batch.tokens.roll(-1, dims=1)[:, first + 1 + j :]]
        # the last token's successor is not in the text
        last = batch.lengths[:, None] - 1
        return (position < last) & follower | (position == last)


def _lead(batch: Batch) -> int:
    return max(2, min(LEAD, int(batch.prompts.min())))


def head_config(config: Any, draft_vocab: int) -> dict[str, Any]:
    """config.json of the head's checkpoint, in the published layout that SGLang loads."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        # SGLang captures the input of layer id + 1
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in CAPTURED],
            "use_aux_hidden_state": True,
        },
    }


def checkpoint_tensors(
    weights: dict[str, torch.Tensor], vocabulary: torch.Tensor, target_head: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The published layout's tensors: fp32, with an LM head of its own instead of `turn`.

    d2t: int64 [draft vocabulary], token minus its number. t2d: bool [vocabulary], whether a token is in the draft's.
    target_head: [vocabulary, hidden].
    """
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in weights.items()}
    inside = torch.zeros(len(target_head), dtype=torch.bool)
    inside[vocabulary] = True
    # (rows @ turn) @ x is rows @ (turn @ x)
    tensors["lm_head.weight"] = target_head[vocabulary].float() @ tensors.pop("turn.weight")
    return {**tensors, "d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": inside}


def write_head(weights: dict[str, torch.Tensor], vocabulary: torch.Tensor, target: LlamaForCausalLM, out: Path) -> None:
    """Write the head's checkpoint; its embedding and tokenizer are the target's."""
    out.mkdir(parents=True, exist_ok=True)
    save_weights(checkpoint_tensors(weights, vocabulary, target.lm_head.weight.detach()), out)
    text = json.dumps(head_config(target.config, len(vocabulary)), indent=1) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
