"""Which weights a checkpoint directory holds, in a few characters: what tells one pair of models from another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from c2t_plugin.errors import C2TError

# Bytes that are read whole, in a few seconds; of larger checkpoints so many pieces of each file, evenly spaced.
WHOLE, PIECES, PIECE = 2**31, 64, 2**16


def fingerprint(checkpoint: Path, config: dict[str, Any]) -> str:
    """Architecture and hash, as a classifier's `pair` has them. config: its config.json. C2TError without weights."""
    files = sorted(checkpoint.glob("model*.safetensors")) or sorted(checkpoint.glob("pytorch_model*.bin"))
    if not files:
        raise C2TError(f"no weights in {checkpoint}: model*.safetensors is missing; name a whole checkpoint")
    sizes = [file.stat().st_size for file in files]
    whole = sum(sizes) <= WHOLE
    digest = hashlib.sha256()
    for file, size in zip(files, sizes, strict=True):
        for piece in _whole(file) if whole else _sampled(file, size):
            digest.update(piece)
    name = config.get("architectures", [config.get("model_type")])[0]
    return f"{name} {'sha256' if whole else 'sampled'}:{digest.hexdigest()[:16]}"


def same(found: Mapping[str, Any], pair: Mapping[str, Any]) -> bool:
    """Whether two descriptions of pairs are of the same weights."""
    return all(found.get(name) == pair[name] for name in ("target", "draft"))


def known(pair: Mapping[str, Any]) -> bool:
    """Whether this description of a pair has fingerprints, and not names."""
    return all(" sha256:" in pair[name] or " sampled:" in pair[name] for name in ("target", "draft"))


def _whole(file: Path) -> Iterator[bytes]:
    with file.open("rb") as handle:
        while piece := handle.read(2**24):
            yield piece


def _sampled(file: Path, size: int) -> Iterator[bytes]:
    yield str(size).encode()
    with file.open("rb") as handle:
        for number in range(PIECES):
            handle.seek(number * max(0, size - PIECE) // (PIECES - 1))
            yield handle.read(PIECE)
