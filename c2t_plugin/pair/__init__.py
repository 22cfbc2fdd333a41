"""The project's own target and drafts: small enough to ship, trained by `c2t pair train`, served by stock engines.

A pair directory holds target/, draft/, eagle3/, eagle1/ (each a checkpoint directory with its tokenizer),
held_out_prompts.json, held_out_files.json and provenance.json.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from c2t_plugin.errors import C2TError

PROMPTS_FILE = "held_out_prompts.json"
SHIPPED = Path(__file__).parent / "weights"


def pair_dir() -> Path:
    """Directory of the pair in use: C2T_PAIR if set, else the shipped one. C2TError if it holds no target."""
    from c2t_plugin import envs

    directory = envs.pair() or SHIPPED
    if not (directory / "target" / "model.safetensors").is_file():
        raise C2TError(
            f"no pair in {directory}: expected target/model.safetensors there; "
            "train one with `c2t pair train --out DIR` and set C2T_PAIR=DIR"
        )
    return directory


def load_prompts(directory: Path | None = None) -> list[dict]:
    """All held-out prompts of a pair directory (pair_dir() if None), in file order.

    Each is {"file": relative path, "text": str, "ids": list[int]}; ids are the tokens of text.
    """
    path = (directory or pair_dir()) / PROMPTS_FILE
    if not path.is_file():
        raise C2TError(f"{path} is missing; `c2t pair train` writes it")
    return json.loads(path.read_text(encoding="utf-8"))["prompts"]


def held_out_prompts(n: int, min_tokens: int = 64, max_tokens: int = 128, seed: int = 0) -> list[list[int]]:
    """n prompts (token ids) from files that no model of the pair was trained on; equal on every machine.

    Drawn without repetition among those with min_tokens <= length <= max_tokens (both in tokens).
    C2TError if fewer than n fit.
    """
    fitting = [p["ids"] for p in load_prompts() if min_tokens <= len(p["ids"]) <= max_tokens]
    if n > len(fitting):
        raise C2TError(f"asked for {n} prompts of {min_tokens}-{max_tokens} tokens, the pair has {len(fitting)}")
    return random.Random(seed).sample(fitting, n)
