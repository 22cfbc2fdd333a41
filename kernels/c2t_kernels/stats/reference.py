"""Statistics of draft distributions: most probable tokens, top-M entropy, margin."""

from __future__ import annotations

from typing import NamedTuple

import torch
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


def draft_stats(
    logits: Tensor,
    top_m: int | Tensor,
    k: int = 1,
    *,
    out: DraftStats | None = None,
    at: Tensor | None = None,
) -> DraftStats:
    """c2t_kernels.draft_stats, which says what it computes, in float32 torch."""
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"draft_stats: logits must be (rows, vocab), got shape {tuple(logits.shape)}")
    vocab, top_m = logits.shape[1], int(top_m)
    if top_m < 1:
        raise ValueError(f"draft_stats: top_m must be at least 1, got {top_m}")
    if not 1 <= k <= vocab:
        raise ValueError(f"draft_stats: k must be between 1 and the vocabulary ({vocab}), got {k}")
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    leading = log_probs.topk(min(max(k, 2), vocab), dim=-1)
    # The sum needs no order; sorting M of them would be the slowest part on a CPU.
    largest = log_probs.topk(top_m, dim=-1, sorted=False).values if top_m < vocab else log_probs
    # entr(0) is 0, where p * log p would be 0 * -inf = NaN.
    entropy = torch.special.entr(largest.exp()).sum(dim=-1)
    margin = leading.values[:, 0] - leading.values[:, 1] if vocab > 1 else entropy * 0
    return DraftStats(leading.indices[:, :k], leading.values[:, :k], entropy, margin).into(out, at)
