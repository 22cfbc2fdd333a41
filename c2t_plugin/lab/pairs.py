"""A pair directory's models, ready to draft: the shapes come from each checkpoint's own config.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.drafts import DraftModel, HeadDraft, StandaloneDraft
from c2t_plugin.pair.load import load_head
from c2t_plugin.pair.recipe import Recipe


def load_pair(directory: Path, kind: str) -> tuple[LlamaForCausalLM, DraftModel]:
    """Target and draft in float32. kind: draft (stand-alone), eagle3, eagle1 or mtp.

    C2TError if a checkpoint is missing or the draft has another vocabulary than the target.
    """
    target_config, config = _config(directory / "target"), _config(directory / kind)
    vocab = draft_vocab_size(config)
    if vocab != target_config["vocab_size"]:
        raise C2TError(
            f"{directory / kind} has a vocabulary of {vocab}, the target of {target_config['vocab_size']}; "
            "trees are grown with drafts that share the target's"
        )
    target = _llama(directory / "target")
    if kind == "draft":
        return target, StandaloneDraft(_llama(directory / kind))
    recipe = head_recipe(config, target_config)
    return target, HeadDraft(load_head(kind, recipe, target, directory), target)


def head_recipe(config: dict[str, Any], target_config: dict[str, Any]) -> Recipe:
    """The shapes of a head, as the pair's own code names them."""
    recipe = Recipe()
    if "eagle_config" in config:
        # SGLang captures the input of layer id + 1
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        captured = tuple(layer + 1 for layer in ids)
    else:
        captured = recipe.captured
    return replace(
        recipe,
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=max(target_config["num_hidden_layers"], max(captured) + 1),
        intermediate=config["intermediate_size"],
        captured=captured,
    )


def describe_pair(directory: Path, kind: str) -> dict[str, Any]:
    """What a classifier file says about its pair: architectures, hashes of the weights, words of the draft."""
    config = _config(directory / kind)
    return {
        "target": _fingerprint(directory / "target"),
        "draft": _fingerprint(directory / kind),
        "kind": kind,
        "draft_vocab_size": draft_vocab_size(config),
    }


def draft_vocab_size(config: dict[str, Any]) -> int:
    """How many words a draft chooses from."""
    return int(config.get("draft_vocab_size") or config["vocab_size"])


def _fingerprint(checkpoint: Path) -> str:
    digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    return f"{_config(checkpoint)['architectures'][0]} sha256:{digest[:16]}"


def _config(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "config.json"
    if not path.is_file():
        raise C2TError(f"no checkpoint in {checkpoint}: config.json is missing; name a pair directory that has one")
    return json.loads(path.read_text(encoding="utf-8"))


def _llama(checkpoint: Path) -> LlamaForCausalLM:
    # its bar would break into the one of the command
    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
    return model.eval().requires_grad_(False)
