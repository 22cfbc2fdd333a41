"""Checkpoint directories of a pair: written in the layout that SGLang loads, read back from disk only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaForCausalLM

from benchmarks.pairs.toy.models import llama_config, new_head
from benchmarks.pairs.toy.recipe import HEAD_DIM, Recipe
from benchmarks.pairs.toy.tokenizer import save_tokenizer
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.heads import EagleHead
from c2t_plugin.lab.pair_files import read_weights, weights_path

ARCHITECTURES = {
    "target": "LlamaForCausalLM",
    "draft": "LlamaForCausalLM",
    "eagle3": "LlamaForCausalLMEagle3",
    "eagle1": "LlamaForCausalLMEagle",
    # engines load it as a part of the checkpoint that export.py writes
    "mtp": "MiMoMTP",
    "small_target": "LlamaForCausalLM",
}


def checkpoint_config(kind: str, recipe: Recipe) -> dict[str, Any]:
    """config.json of a checkpoint of the given kind."""
    shape = recipe.shape(kind)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": "llama",
        "vocab_size": recipe.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    if kind == "eagle3":
        config["draft_vocab_size"] = recipe.vocab_size
        config["target_hidden_size"] = recipe.hidden
        # SGLang captures the input of layer id + 1
        ids = [layer - 1 for layer in recipe.captured]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return config


def save_checkpoint(kind: str, module: nn.Module, recipe: Recipe, tokenizer: Tokenizer, directory: Path) -> None:
    """Write config.json, model.safetensors (bf16) and the tokenizer files; an existing checkpoint is replaced."""
    save_tokenizer(tokenizer, directory)
    (directory / "config.json").write_text(json.dumps(checkpoint_config(kind, recipe), indent=1) + "\n", "utf-8")
    state = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in module.state_dict().items()
    }
    if recipe.shape(kind).tied:
        # tied to the embedding
        state.pop("lm_head.weight")
    save_weights(state, directory)


def save_weights(state: dict[str, torch.Tensor], directory: Path) -> None:
    """Write or replace model.safetensors of a checkpoint directory."""
    temporary = weights_path(directory).with_suffix(".part")
    save_file(state, temporary, metadata={"format": "pt"})
    # safetensors writes files that only their owner can read
    temporary.chmod(0o644)
    temporary.replace(weights_path(directory))


def load_llama(kind: str, recipe: Recipe, directory: Path, device: str = "cpu") -> LlamaForCausalLM:
    """A target or the stand-alone draft of a pair directory, fp32 with the shipped bf16 values, ready to run."""
    model = LlamaForCausalLM(llama_config(recipe, kind))
    state = {name: tensor.float() for name, tensor in read_weights(directory / kind).items()}
    if recipe.shape(kind).tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)


def load_head(kind: str, recipe: Recipe, target: LlamaForCausalLM, directory: Path) -> EagleHead:
    """The eagle3, eagle1 or mtp head of a pair directory, fp32 with the shipped bf16 values, ready to run."""
    head = new_head(kind, recipe, target)
    head.load_state_dict({name: tensor.float() for name, tensor in read_weights(directory / kind).items()})
    return head.eval().requires_grad_(False)


def load_recipe(directory: Path) -> Recipe:
    """The recipe that a pair directory was trained with."""
    path = directory / "recipe.json"
    if not path.is_file():
        raise C2TError(f"{path} is missing; `python -m benchmarks.pairs.toy train` writes it")
    return Recipe.from_json(json.loads(path.read_text(encoding="utf-8")))
