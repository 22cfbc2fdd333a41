"""What `draft_stats` gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DraftStats(NamedTuple):
    """Statistics of the distributions that draft tokens are chosen from, one row per distribution.

    token_ids: (rows, k) int64, the k most probable ids of the draft vocabulary, most probable first.
    log_probs: (rows, k) float32, their natural-log probabilities.
    entropy: (rows,) float32, nats, over the top_m probabilities, not renormalised.
    margin: (rows,) float32, difference of the two largest log probabilities (0 if the vocabulary has one token).

    A row with NaN or +inf, or without a finite entry, has NaN in every float field.
    """

    token_ids: Tensor
    log_probs: Tensor
    entropy: Tensor
    margin: Tensor

    def into(self, out: DraftStats | None, at: Tensor | None) -> DraftStats:
        """The same in buffers, as draft_stats is asked for it."""
        if out is None:
            return self
        for field, value in zip(out, self, strict=True):
            field[slice(None) if at is None else at] = value
        return out
