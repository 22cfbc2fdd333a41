"""A pair directory's models, ready to draft: the shapes come from each checkpoint's own config.json.

Target and stand-alone draft may be any causal LMs of transformers: a Llama is drafted with by our own code, any other
model through its cache.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.causal import CausalDraft
from c2t_plugin.lab.drafts import DraftModel, HeadDraft, StandaloneDraft
from c2t_plugin.pair.load import load_head
from c2t_plugin.pair.recipe import Recipe


def load_pair(directory: Path, kind: str) -> tuple[PreTrainedModel, DraftModel]:
    """Target and draft in float32. kind: draft (stand-alone), eagle3, eagle1 or mtp.

    C2TError if a checkpoint is missing, the draft has another vocabulary than the target, or a head's target is no
    Llama.
    """
    target_config, config = _config(directory / "target"), _config(directory / kind)
    _check_vocabulary(directory, kind, target_config, config)
    target = _causal_lm(directory / "target")
    if kind == "draft":
        return target, stand_alone(_causal_lm(directory / kind))
    if not isinstance(target, LlamaForCausalLM):
        raise C2TError(f"{kind} heads are read beside Llama targets, this one is {type(target).__name__}; take a draft")
    recipe = head_recipe(config, target_config)
    return target, HeadDraft(load_head(kind, recipe, target, directory), target)


def stand_alone(model: PreTrainedModel) -> DraftModel:
    """A causal LM as a stand-alone draft."""
    return StandaloneDraft(model) if isinstance(model, LlamaForCausalLM) else CausalDraft(model)


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
    files = sorted(checkpoint.glob("model*.safetensors")) or sorted(checkpoint.glob("pytorch_model*.bin"))
    if not files:
        raise C2TError(f"no weights in {checkpoint}: model*.safetensors is missing; name a whole checkpoint")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            while piece := handle.read(2**24):
                digest.update(piece)
    return f"{_config(checkpoint)['architectures'][0]} sha256:{digest.hexdigest()[:16]}"


def _check_vocabulary(directory: Path, kind: str, target_config: dict[str, Any], config: dict[str, Any]) -> None:
    """Token ids must mean the same to both. Sizes may differ where the tokenizers agree: some models are padded."""
    vocab, wanted = draft_vocab_size(config), target_config["vocab_size"]
    paths = [directory / name / "tokenizer.json" for name in ("target", kind)]
    if kind == "draft" and all(path.is_file() for path in paths):
        own, other = (Tokenizer.from_file(str(path)).get_vocab() for path in paths)
        if own != other:
            odd = len(own.items() ^ other.items())
            raise C2TError(
                f"the tokenizers of {directory / kind} and of the target differ in {odd} entries; trees are grown with "
                "drafts that share the target's vocabulary"
            )
        if max(own.values()) < min(vocab, wanted):
            return
    if vocab != wanted:
        raise C2TError(
            f"{directory / kind} has a vocabulary of {vocab}, the target of {wanted}; "
            "trees are grown with drafts that share the target's"
        )


def _config(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "config.json"
    if not path.is_file():
        raise C2TError(f"no checkpoint in {checkpoint}: config.json is missing; name a pair directory that has one")
    return json.loads(path.read_text(encoding="utf-8"))


def _causal_lm(checkpoint: Path) -> PreTrainedModel:
    # its bar would break into the one of the command
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise C2TError(f"{checkpoint} is not a causal LM that transformers can load: {reason}") from error
    return model.eval().requires_grad_(False)
