"""Targets of realistic cost whose function is the shipped pair's: real acceptance at real cost, nothing to download.

    python -m benchmarks.pairs.inflated --preset 8b --out DIR --device cuda

writes DIR/target and DIR/eagle3, others with --kinds, in the layout that transformers and SGLang load. Each tensor is
made on the device and a checkpoint is written shard by shard, so that no more than one shard is in memory.
benchmarks/pairs/inflated/weights.py has the construction. In float32 logits are the small model's but for rounding; in
bfloat16 big and small model round differently, so compare greedy outputs with the big model itself.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.pairs.inflated.weights import BIG_EPS, Inflation, Shape, Weight, eagle1, eagle3, llama
from benchmarks.pairs.toy import pair_dir
from c2t_plugin.classifier import CALIBRATED_NAME, FILE_NAME
from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.provenance import RunRecord

KINDS = ("target", "eagle3", "eagle1", "draft")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHARD_BYTES = 4 << 30
# the pair was trained on texts of at most 2,048 tokens; longer ones cost what they cost
MAX_POSITIONS = 32_768


@dataclass(frozen=True)
class Preset:
    """What is written: the target's shape, the stand-alone draft's, and the vocabulary of the EAGLE-3 head."""

    target: Shape
    draft: Shape
    draft_vocab: int


PRESETS = {
    # small enough for a CPU's tests: another head size, larger groups, more of everything
    "tiny": Preset(
        Shape(hidden=384, layers=6, heads=12, kv_heads=4, head_dim=128, intermediate=768, vocab=4200),
        Shape(hidden=256, layers=3, heads=8, kv_heads=2, head_dim=64, intermediate=640, vocab=4200),
        draft_vocab=4150,
    ),
    # the same around SmolLM2
    "small": Preset(
        Shape(hidden=768, layers=31, heads=12, kv_heads=4, head_dim=128, intermediate=1664, vocab=49_280),
        Shape(hidden=640, layers=31, heads=10, kv_heads=2, head_dim=64, intermediate=1664, vocab=49_280),
        draft_vocab=8_320,
    ),
    # shapes of Llama 3.1 8B and 70B and of Llama 3.2 1B; published EAGLE-3 heads for them know 32,000 tokens
    "8b": Preset(
        Shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14_336, vocab=128_256),
        Shape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128_256),
        draft_vocab=32_000,
    ),
    "70b": Preset(
        Shape(hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, intermediate=28_672, vocab=128_256),
        Shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14_336, vocab=128_256),
        draft_vocab=32_000,
    ),
}


def inflate(
    kind: str,
    preset: Preset,
    source: Path,
    out: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write out/kind from source/kind.

    kind: one of KINDS. source: directory of a pair. shard_bytes: the most that a shard holds, unless a single tensor is
    larger. Nothing is left of a checkpoint that was not finished.
    Raises C2TError if there is no such checkpoint, or something is in the way, or the disk is too small.
    """
    small_dir, big_dir = source / kind, out / kind
    if kind not in KINDS or not (small_dir / "model.safetensors").is_file():
        raise C2TError(f"no {kind} in {source.name}: expected one of {', '.join(KINDS)}, with model.safetensors")
    if big_dir.exists():
        raise C2TError(f"{big_dir} is in the way; remove it, or name another --out")
    config = json.loads((small_dir / "config.json").read_text(encoding="utf-8"))
    outer = preset.draft if kind == "draft" else preset.target
    weights = list(_weights(kind, load_file(small_dir / "model.safetensors"), config, outer, preset.draft_vocab))
    size = sum(_bytes(weight, dtype) for weight in weights)
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if size > free:
        raise C2TError(f"{kind} takes {size / 1e9:.1f} GB and {out} has {free / 1e9:.1f} GB left; name another --out")
    part = out / f"{kind}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        _write_shards(weights, part, dtype, torch.Generator(device).manual_seed(seed), shard_bytes)
        (part / "config.json").write_text(json.dumps(_config(kind, config, outer, preset, dtype), indent=1) + "\n")
        for name in ("tokenizer.json", "tokenizer_config.json", FILE_NAME, CALIBRATED_NAME):
            if (small_dir / name).is_file():
                shutil.copyfile(small_dir / name, part / name)
        record = {"shape": asdict(outer), "source": config, "run": RunRecord.capture(seed=seed).to_json()}
        (part / "inflated.json").write_text(json.dumps(record, indent=1) + "\n")
        part.rename(big_dir)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _weights(
    kind: str, small: dict[str, Tensor], config: dict[str, Any], outer: Shape, draft_vocab: int
) -> Iterator[Weight]:
    inflation = Inflation(small, Shape.of(config), outer, config["rms_norm_eps"])
    if kind == "eagle1":
        return eagle1(inflation)
    if kind == "eagle3":
        if not config["draft_vocab_size"] <= draft_vocab <= outer.vocab:
            raise ConfigError(
                f"an EAGLE-3 head of {config['draft_vocab_size']} tokens can be given up to {outer.vocab}, "
                f"not {draft_vocab}"
            )
        return eagle3(inflation, draft_vocab)
    return llama(inflation)


def _config(kind: str, small: dict[str, Any], outer: Shape, preset: Preset, dtype: torch.dtype) -> dict[str, Any]:
    """config.json: the small one's, which keeps the numbers of captured layers, with the sizes of the shape."""
    config = small | {
        "hidden_size": outer.hidden,
        "num_attention_heads": outer.heads,
        "num_key_value_heads": outer.kv_heads,
        "head_dim": outer.head_dim,
        "intermediate_size": outer.intermediate,
        "vocab_size": outer.vocab,
        "rms_norm_eps": BIG_EPS,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if kind in ("target", "draft"):
        config["num_hidden_layers"] = outer.layers
    if kind == "eagle3":
        config |= {"draft_vocab_size": preset.draft_vocab, "target_hidden_size": outer.hidden}
    return config


def _bytes(weight: Weight, dtype: torch.dtype) -> int:
    return math.prod(weight.shape) * (8 if weight.integer else dtype.itemsize)


def _shards(weights: Sequence[Weight], dtype: torch.dtype, limit: int) -> list[list[Weight]]:
    """In the given order, each as full as the limit lets it be."""
    shards: list[list[Weight]] = [[]]
    used = 0
    for weight in weights:
        size = _bytes(weight, dtype)
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(weight)
        used += size
    return shards


def _write_shards(
    weights: Sequence[Weight], directory: Path, dtype: torch.dtype, generator: torch.Generator, limit: int
) -> None:
    """model-I-of-N.safetensors and their index, one shard in memory at a time."""
    shards = _shards(weights, dtype, limit)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {weight.name: weight.make(dtype, generator).cpu() for weight in shard}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        # safetensors writes files that only their owner can read
        (directory / name).chmod(0o644)
        index |= dict.fromkeys(tensors, name)
        del tensors
    total = sum(_bytes(weight, dtype) for weight in weights)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (directory / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    """Write the asked-for checkpoints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pairs.inflated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to write target/, eagle3/ ... into")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["target", "eagle3"])
    parser.add_argument("--pair", type=Path, help="directory of the small pair; the one in use without it")
    parser.add_argument("--device", default="cpu", help="where the tensors are made")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    options = parser.parse_args(argv)
    try:
        source = options.pair or pair_dir()
        for kind in options.kinds:
            inflate(
                kind,
                PRESETS[options.preset],
                source,
                options.out,
                device=options.device,
                dtype=DTYPES[options.dtype],
                seed=options.seed,
            )
            print(f"wrote {options.out / kind}")
    except (C2TError, OSError, RuntimeError) as error:
        print(f"inflate: {error}", file=sys.stderr)
        return 2
    return 0
