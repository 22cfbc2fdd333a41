"""The trace file: trees and chains of one draft, every node with its acceptance, as one safetensors file.

Log probabilities are float32: a replay must make the very decisions that a server makes on float32 confidences, and
float16 resolves a joint log probability of -9 to .004 only, some 4 parts in 1,000 of P. Entropy and margin are float32
too, but kept once per distribution, and depth and rank follow from the column: 14 KB per tree of 1,010 draft nodes.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from c2t_plugin import forest
from c2t_plugin.errors import C2TError
from c2t_plugin.forest import TABLES, Forest

FORMAT = "c2t-traces"
VERSION = "1"
# of the files that a server writes
SUFFIX = ".traces"
DTYPES = {**forest.DTYPES, "accepted": torch.bool}
STATES = {"prompt": torch.int32, "step": torch.int16, "novel": torch.bool}


@dataclass(frozen=True)
class Traces:
    """Decoding states with their drafts; row i of everything is the same state.

    tree: whole trees. chain: the greedy chains, which a tree need not hold to the end. prompt: (states,) int32 number
    of the prompt. step: (states,) int16 new tokens before the root; the states of a prompt are consecutive and in this
    order, of consecutive tokens if `c2t collect` wrote them, of those that were drafted at if a server did.
    novel: (states,) bool, see `novel_tokens`. header: draft, pair, top_m, prompts, seed, provenance.
    """

    tree: Forest
    chain: Forest
    prompt: Tensor
    step: Tensor
    novel: Tensor
    header: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.prompt)

    def __getitem__(self, rows: Tensor) -> Traces:
        """The states of these rows (bool mask)."""
        return Traces(
            self.tree[rows], self.chain[rows], self.prompt[rows], self.step[rows], self.novel[rows], self.header
        )


# A small target falls into loops, in which every draft is right; so many repeated tokens are one.
NOVELTY = 8


def novel_tokens(token_ids: Sequence[int], size: int = NOVELTY) -> list[bool]:
    """Of every token, whether it and the size - 1 before it occur together nowhere earlier; the first ones do not."""
    seen: set[tuple[int, ...]] = set()
    found = [True] * min(size - 1, len(token_ids))
    for end in range(size, len(token_ids) + 1):
        gram = tuple(token_ids[end - size : end])
        found.append(gram not in seen)
        seen.add(gram)
    return found


def join_traces(parts: Sequence[Traces]) -> Traces:
    """All states of several traces of one draft; their prompts are numbered anew. The header is the first one's.

    Raises C2TError unless all have the same pair, top_m and shapes.
    """
    first = parts[0]
    for part in parts[1:]:
        same = all(part.header[name] == first.header[name] for name in ("pair", "top_m"))
        if not same or (part.tree.k, part.tree.layers, part.chain.layers) != (
            *(first.tree.k, first.tree.layers, first.chain.layers),
        ):
            raise C2TError("traces of different drafts, top_m or shapes cannot be joined; take them one by one")
    numbers, offset = [], 0
    for part in parts:
        numbers.append(part.prompt + offset)
        offset = int(numbers[-1].max()) + 1 if len(part) else offset
    return replace(
        first,
        tree=forest.join([part.tree for part in parts]),
        chain=forest.join([part.chain for part in parts]),
        prompt=torch.cat(numbers),
        step=torch.cat([part.step for part in parts]),
        novel=torch.cat([part.novel for part in parts]),
    )


def save_traces(traces: Traces, path: str | os.PathLike[str]) -> None:
    """Write the file whole or not at all."""
    path = Path(path)
    tensors = {name: getattr(traces, name).to(dtype).contiguous() for name, dtype in STATES.items()}
    for part in ("tree", "chain"):
        forest = getattr(traces, part)
        tensors |= {f"{part}.{name}": getattr(forest, name).contiguous() for name in TABLES}
    shape = {part: {"k": getattr(traces, part).k, "layers": getattr(traces, part).layers} for part in ("tree", "chain")}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "shape": json.dumps(shape),
        "checksum": checksum(tensors),
        "header": json.dumps(dict(traces.header), sort_keys=True),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    save_file(tensors, temporary, metadata=metadata)
    temporary.replace(path)


def load_traces(path: str | os.PathLike[str]) -> Traces:
    """Read a trace file, or all of a directory as one. C2TError if one is missing, damaged or of another format."""
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob(f"*{SUFFIX}"))
        if not files:
            raise C2TError(f"{path} holds no trace file (*{SUFFIX})")
        return join_traces([load_traces(file) for file in files])
    if not path.is_file():
        raise C2TError(f"trace file not found: {path}; write one with `c2t collect`")
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            for name in handle.keys():  # noqa: SIM118 -- safe_open is no mapping
                tensors[name] = handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise C2TError(f"{path} is not a readable safetensors file ({error}); collect it again") from error
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        found = f"format {metadata.get('format')!r} version {metadata.get('version')!r}"
        raise C2TError(f"{path} has {found}, this build reads {FORMAT!r} version {VERSION!r}; collect it again")
    _check(path, tensors, metadata)
    tree, chain = (
        Forest(shape["k"], shape["layers"], **{name: tensors[f"{part}.{name}"] for name in TABLES})
        for part, shape in json.loads(metadata["shape"]).items()
    )
    return Traces(tree, chain, **{name: tensors[name] for name in STATES}, header=json.loads(metadata["header"]))


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 over all tensors in order of their names: safetensors itself does not notice a changed byte."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def _check(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    expected = {f"{part}.{name}": DTYPES.get(name, torch.float32) for part in ("tree", "chain") for name in TABLES}
    expected |= STATES
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    if found != expected:
        odd = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise C2TError(f"{path} lacks, or has in another type, {', '.join(odd)}; collect it again")
    if checksum(tensors) != metadata.get("checksum"):
        raise C2TError(f"{path} is damaged: its contents do not match its checksum; collect it again")
