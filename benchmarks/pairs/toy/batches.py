"""Training batches: a function of seed and step alone, so that a continued run sees the same text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class TextMix:
    """Windows of a token stream mixed with rows of the target's own text.

    corpus: int16 [tokens]. own: int16 [rows, length] or None. length: tokens per sequence. seed: two runs with the
    same seed draw the same batches.
    """

    corpus: np.ndarray
    own: np.ndarray | None
    length: int
    seed: int

    def batch(self, step: int, size: int, corpus_share: float) -> torch.Tensor:
        """int64 [size, length]: round-to-chance `corpus_share` of the rows from random corpus positions."""
        rng = np.random.default_rng([self.seed, step])
        from_corpus = size if self.own is None else int(np.floor(corpus_share * size + rng.random()))
        starts = rng.integers(0, len(self.corpus) - self.length, from_corpus)
        rows = [self.corpus[start : start + self.length] for start in starts]
        if self.own is not None and from_corpus < size:
            rows.extend(self.own[rng.integers(0, len(self.own), size - from_corpus)])
        return torch.from_numpy(np.stack(rows).astype(np.int64))
