"""The project's own target and drafts: small enough to ship, trained by its own recipe, served by stock engines.

A pair directory holds target/, draft/, eagle3/, eagle1/, mtp/ (each a checkpoint directory), held_out_prompts.json,
held_out_files.json and provenance.json.
"""

from __future__ import annotations

import random
from pathlib import Path

from c2t_plugin import envs
from c2t_plugin.errors import C2TError
from c2t_plugin.lab import pair_files

SHIPPED = Path(__file__).parent / "weights"


def pair_dir() -> Path:
    """Directory of the pair in use: C2T_PAIR if set, else the shipped one. C2TError if it holds no target."""
    return pair_files.check_pair(envs.pair() or SHIPPED)


def load_prompts(directory: Path | None = None) -> list[dict]:
    """All held-out prompts of a pair directory (pair_dir() if None); see the lab's load_prompts."""
    return pair_files.load_prompts(directory or pair_dir())


def held_out_prompts(n: int, min_tokens: int = 64, max_tokens: int = 128, seed: int = 0) -> list[list[int]]:
    """n prompts (token ids) from files that no model of the pair was trained on; equal on every machine.

    Drawn without repetition among those with min_tokens <= length <= max_tokens (both in tokens).
    C2TError if fewer than n fit.
    """
    fitting = [p["ids"] for p in load_prompts() if min_tokens <= len(p["ids"]) <= max_tokens]
    if n > len(fitting):
        raise C2TError(f"asked for {n} prompts of {min_tokens}-{max_tokens} tokens, the pair has {len(fitting)}")
    return random.Random(seed).sample(fitting, n)
