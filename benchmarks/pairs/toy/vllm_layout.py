"""A pair's checkpoints as vLLM loads them: the same values under other configuration keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from c2t_plugin.classifier import FILE_NAME

HEADS = ("eagle1", "eagle3")


def write_vllm_layout(pair: Path, folder: Path) -> Path:
    """Write the pair into `folder` for vLLM and return it. Classifiers stay in the pair.

    vLLM loads every safetensors file of a checkpoint, and so would stumble over a classifier beside the draft.
    EAGLE-3: vLLM captures the input of the named layers, SGLang (the pair's own layout) what a layer hands on.
    EAGLE-1: vLLM's `fc` has no bias. The head gets an embedding table of its own, moved so that the bias comes out of
    the product: fc(e + x, h) = fc(e, h) + b where fc's left half maps x to b.
    """
    for name in ("target", "draft", *HEADS):
        if (pair / name).is_dir():
            _link(pair / name, folder / name)
    for name in HEADS:
        if (pair / name).is_dir():
            _rewrite(pair, name, folder / name)
    return folder


def _link(checkpoint: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if not file.name.startswith(Path(FILE_NAME).stem):
            (out / file.name).unlink(missing_ok=True)
            (out / file.name).symlink_to(file.resolve())


def _rewrite(pair: Path, name: str, out: Path) -> None:
    config: dict[str, Any] = json.loads((pair / name / "config.json").read_text(encoding="utf-8"))
    weights = load_file(pair / name / "model.safetensors")
    if name == "eagle3":
        layers = [layer + 1 for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        config["eagle_aux_hidden_state_layer_ids"] = layers
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = layers
    else:
        config |= {"architectures": ["EagleLlamaForCausalLM"], "torch_dtype": "float32"}
        embedding = load_file(pair / "target" / "model.safetensors")["model.embed_tokens.weight"]
        weights = _without_bias({key: value.float() for key, value in weights.items()}, embedding.float())
    for file in ("config.json", "model.safetensors"):
        (out / file).unlink()
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def _without_bias(weights: dict[str, Tensor], embedding: Tensor) -> dict[str, Tensor]:
    bias, left = weights.pop("fc.bias").double(), weights["fc.weight"][:, : embedding.shape[1]].double()
    moved = embedding.double() + torch.linalg.solve(left, bias)
    return {**weights, "embed_tokens.weight": moved.float()}
