"""Statistics of draft distributions: most probable tokens, top-M entropy, margin."""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_kernels.stats.result import DraftStats


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
