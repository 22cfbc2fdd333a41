"""A pair directory's models, ready to draft: the shapes come from each checkpoint's own config.json.

Target and stand-alone draft may be any causal LMs of transformers: a Llama is drafted with by our own code, any other
model through its cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import logging

from c2t_plugin import json_text
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.causal import CausalDraft
from c2t_plugin.lab.drafts import DraftModel, HeadDraft, StandaloneDraft
from c2t_plugin.lab.heads import HEADS, HeadShape
from c2t_plugin.lab.pair_files import load_tokenizer, read_weights
from c2t_plugin.weights import fingerprint

_NOT_THE_HEADS = ("t2d", "embed_tokens.weight", "model.embed_tokens.weight")


def load_pair(directory: Path, kind: str) -> tuple[PreTrainedModel, DraftModel]:
    """Target and draft in float32. kind: draft (stand-alone), eagle3, eagle1 or mtp.

    A head may choose from a part of the target's tokens (EAGLE-3's d2t). C2TError if a checkpoint is missing or does
    not fit the target.
    """
    target_config, config = _config(directory / "target"), _config(directory / kind)
    _check_vocabulary(directory, kind, target_config, config)
    target = _causal_lm(directory / "target")
    if kind == "draft":
        return target, stand_alone(_causal_lm(directory / kind))
    return target, _head(directory, kind, config, target)


def stand_alone(model: PreTrainedModel) -> DraftModel:
    """A causal LM as a stand-alone draft."""
    return StandaloneDraft(model) if isinstance(model, LlamaForCausalLM) else CausalDraft(model)


def head_shape(kind: str, config: dict[str, Any], layers: int) -> HeadShape:
    """From a head's config.json; layers: of the target."""
    config = {"rope_theta": 10000.0, **config}
    llama = LlamaConfig.from_dict(config)
    ids = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    # What SGLang captures: the input of layer id + 1, and these three where the file names none.
    captured = (2, layers // 2, layers - 3) if ids is None else tuple(layer + 1 for layer in ids)
    return HeadShape(
        hidden=llama.hidden_size,
        intermediate=llama.intermediate_size,
        heads=llama.num_attention_heads,
        kv_heads=llama.num_key_value_heads or llama.num_attention_heads,
        vocab=draft_vocab_size(config),
        captured=captured if kind == "eagle3" else (),
        eps=llama.rms_norm_eps,
        rates=LlamaRotaryEmbedding(llama).inv_freq,
    )


def _head(directory: Path, kind: str, config: dict[str, Any], target: PreTrainedModel) -> HeadDraft:
    hidden, layers = target.config.hidden_size, target.config.num_hidden_layers
    if config["hidden_size"] != hidden:
        raise C2TError(f"{directory / kind} has hidden states of {config['hidden_size']}, the target of {hidden}")
    # The engines draft with the target's embedding; t2d is d2t the other way.
    weights = {name: value for name, value in read_weights(directory / kind).items() if name not in _NOT_THE_HEADS}
    offsets = weights.pop("d2t", None)
    try:
        shape = head_shape(kind, config, layers)
        if not all(type(layer) is int and 0 <= layer <= layers for layer in shape.captured):
            raise ValueError(f"it reads the layers {shape.captured}, the target has {layers}")
        # before there is one, which may not fit into memory
        largest = shape.hidden * max(shape.intermediate, shape.kv_heads * (shape.hidden // shape.heads))
        if largest > sum(value.numel() for value in weights.values()):
            raise ValueError("config.json says more weights than there are")
        head = HEADS[kind](shape)
        head.load_state_dict({name: value.float() for name, value in weights.items()})
    except Exception as error:
        # of many kinds, by what is wrong
        reason = " ".join(str(error).split())
        raise C2TError(f"{directory / kind} is not an {kind} head of the layout that is read here: {reason}") from error
    token_ids = None if offsets is None else torch.arange(len(offsets)) + offsets
    return HeadDraft(head.eval().requires_grad_(False), target, token_ids)


def describe_pair(directory: Path, kind: str) -> dict[str, Any]:
    """What a classifier file says about its pair: architectures, hashes of the weights, tokens of the draft."""
    config = _config(directory / kind)
    return {
        "target": fingerprint(directory / "target", _config(directory / "target")),
        "draft": fingerprint(directory / kind, config),
        "kind": kind,
        "draft_vocab_size": draft_vocab_size(config),
    }


def draft_vocab_size(config: dict[str, Any]) -> int:
    """How many tokens a draft chooses from."""
    return int(config.get("draft_vocab_size") or config["vocab_size"])


def _check_vocabulary(directory: Path, kind: str, target_config: dict[str, Any], config: dict[str, Any]) -> None:
    """Token ids must mean the same to both. Sizes may differ where the tokenizers agree: some models are padded."""
    vocab, wanted = draft_vocab_size(config), target_config["vocab_size"]
    checkpoints = ("target", kind)
    if kind == "draft" and all((directory / name / "tokenizer.json").is_file() for name in checkpoints):
        own, other = (load_tokenizer(directory, name).get_vocab() for name in checkpoints)
        if own != other:
            odd = len(own.items() ^ other.items())
            raise C2TError(
                f"the tokenizers of {directory / kind} and of the target differ in {odd} entries; trees are grown with "
                "drafts that share the target's vocabulary"
            )
        if max(own.values()) < min(vocab, wanted):
            return
    if vocab != wanted and not (kind == "eagle3" and vocab < wanted):
        raise C2TError(
            f"{directory / kind} has a vocabulary of {vocab}, the target of {wanted}; "
            "trees are grown with drafts that share the target's"
        )


def _config(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "config.json"
    if not path.is_file():
        raise C2TError(f"no checkpoint in {checkpoint}: config.json is missing; name a pair directory that has one")
    found = json_text.load(path, once=False)
    # without architectures transformers goes by the model's type
    names = found.get("architectures", [found.get("model_type")]) if isinstance(found, dict) else None
    named = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    sizes = [found.get(name) for name in ("vocab_size", "draft_vocab_size")] if named else []
    if not sizes or not all(size is None or (type(size) is int and size > 0) for size in sizes) or not any(sizes):
        raise C2TError(f"{path} does not say architectures and vocab_size; name a whole checkpoint")
    return found


def _causal_lm(checkpoint: Path) -> PreTrainedModel:
    # its bar would break into the one of the command
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
    except Exception as error:
        # of many kinds, by what of a checkpoint is wrong
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise C2TError(f"{checkpoint} is not a causal LM that transformers can load: {reason}") from error
    return model.eval().requires_grad_(False)
