"""The target's hidden states along its own texts, kept on disk so that training need not run the target again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.pairs.smollm2.own_text import Shards, Text, read_shard
from c2t_plugin.lab.heads import hidden_states

# inputs of these layers; the fourth kept state is the last one after its norm
CAPTURED = (2, 15, 27)
BATCH = 16


def states_path(folder: Path, shard: Path) -> Path:
    """File with the states of a shard of texts."""
    return folder / f"{shard.stem}.npy"


def write_states(target: LlamaForCausalLM, shards: Shards, folder: Path) -> None:
    """Write the states of every finished shard that has none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in shards.paths():
        path = states_path(folder, shard)
        if not path.is_file():
            temporary = path.with_suffix(".part")
            with temporary.open("wb") as file:
                np.save(file, states_of(target, list(read_shard(shard))))
            temporary.replace(path)
            print(f"states of {shard.name}", flush=True)


@torch.no_grad()
def states_of(target: LlamaForCausalLM, texts: Sequence[Text]) -> np.ndarray:
    """bfloat16 bits as uint16 [tokens of all texts, 4 * hidden]: captured states, then the last after its norm."""
    starts = np.concatenate([[0], np.cumsum([len(text.tokens) for text in texts])])
    out = np.empty((int(starts[-1]), (len(CAPTURED) + 1) * target.config.hidden_size), np.uint16)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    for begin in range(0, len(order), BATCH):
        rows = order[begin : begin + BATCH]
        tokens = padded([texts[i].tokens for i in rows])
        with torch.autocast(target.device.type, torch.bfloat16):
            states = hidden_states(target, tokens)
        kept = torch.cat([states[layer] for layer in (*CAPTURED, -1)], dim=-1).bfloat16()
        bits = kept.view(torch.int16).numpy().view(np.uint16)
        for row, i in zip(bits, rows, strict=True):
            out[starts[i] : starts[i + 1]] = row[: len(texts[i].tokens)]
    return out


def padded(rows: Sequence[np.ndarray], fill: int = 0) -> torch.Tensor:
    """int64 [rows, longest], filled up at the end."""
    out = torch.full((len(rows), max(map(len, rows))), fill)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = torch.from_numpy(row.astype(np.int64))
    return out
