"""Training batches of own texts with their states, read from disk; which texts a step gets depends on its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.pairs.smollm2.own_text import Shards, Text, read_shard
from benchmarks.pairs.smollm2.states import CAPTURED, padded, states_path

# longest row; a longer text loses the begin of its prompt
WINDOW = 256
# batches whose texts are sorted together, so that rows of a batch have like lengths
POOL = 64


@dataclass(frozen=True, eq=False)
class Batch:
    """tokens: int64 [rows, length]. features: bfloat16 [rows, length, 3 * hidden], the captured states. known:
    bfloat16 [rows, length, hidden], the last state after its norm. prompts, lengths: int64 [rows], tokens of the prompt
    and of the whole text; what lies behind is filled up with zeros.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    known: torch.Tensor
    prompts: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class Row:
    """A text's place: its shard, the first token's number there, tokens of the text and of its prompt.

    number: of the prompt, see own_text.Text.
    """

    shard: int
    start: int
    length: int
    prompt: int
    number: int


class OwnTexts:
    """All texts that have states, as rows of at most `window` tokens."""

    def __init__(self, shards: Shards, folder: Path, window: int = WINDOW) -> None:
        self.shards = [path for path in shards.paths() if states_path(folder, path).is_file()]
        self.folder = folder
        self.texts = [list(read_shard(path)) for path in self.shards]
        self.rows = [row for number, texts in enumerate(self.texts) for row in rows_of(number, texts, window)]

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The batch of a step (0-based); every text comes once before any comes again."""
        per_epoch = len(self.rows) // size
        picks = epoch_order(tuple(self.rows), size, seed, step // per_epoch)[step % per_epoch]
        return self.read([self.rows[i] for i in picks])

    def read(self, rows: Sequence[Row]) -> Batch:
        """Rows with their states."""
        states = [self._states(row) for row in rows]
        tokens = padded([self._tokens(row) for row in rows])
        known = torch.zeros(len(rows), tokens.shape[1], states[0].shape[1], dtype=torch.bfloat16)
        for line, state in zip(known, states, strict=True):
            line[: len(state)] = state
        hidden = known.shape[-1] // (len(CAPTURED) + 1)
        prompts, lengths = (torch.tensor([getattr(row, name) for row in rows]) for name in ("prompt", "length"))
        return Batch(tokens, known[..., :-hidden], known[..., -hidden:], prompts, lengths)

    def _states(self, row: Row) -> torch.Tensor:
        lines = np.load(states_path(self.folder, self.shards[row.shard]), mmap_mode="r")
        bits = np.array(lines[row.start : row.start + row.length]).view(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16)

    def _tokens(self, row: Row) -> np.ndarray:
        return self._stream(row.shard)[row.start : row.start + row.length]

    @cache  # noqa: B019 - one instance lives as long as a training
    def _stream(self, shard: int) -> np.ndarray:
        return np.concatenate([text.tokens for text in self.texts[shard]])


def rows_of(shard: int, texts: Sequence[Text], window: int = WINDOW) -> list[Row]:
    """The rows of one shard: the last `window` tokens of every text that has an answer of two tokens or more."""
    rows, start = [], 0
    for text in texts:
        length = len(text.tokens)
        cut = max(0, length - window)
        if length - text.prompt >= 2 and text.prompt - cut >= 2:
            rows.append(Row(shard, start + cut, length - cut, text.prompt - cut, text.number))
        start += length
    return rows


@lru_cache(maxsize=2)
def epoch_order(rows: tuple[Row, ...], size: int, seed: int, epoch: int) -> list[list[int]]:
    """Row numbers of every batch of an epoch; rows of a batch have like lengths."""
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(rows))[: len(rows) // size * size]
    batches: list[list[int]] = []
    for begin in range(0, len(order), POOL * size):
        pool = sorted(order[begin : begin + POOL * size].tolist(), key=lambda i: rows[i].length)
        batches += [pool[i : i + size] for i in range(0, len(pool), size)]
    return [batches[i] for i in rng.permutation(len(batches))]
