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
    margin: (rows,) float32, difference of the two largest log probabilities (0 if the vocabulary has one word).
    log_sum_exp: (rows,) float32, of the logits: what to take off any of them for its log probability.

    A row with NaN or +inf, or without a finite entry, has NaN in every float field.
    """

    token_ids: Tensor
    log_probs: Tensor
    entropy: Tensor
    margin: Tensor
    log_sum_exp: Tensor


def draft_stats(logits: Tensor, top_m: int | Tensor, k: int = 1) -> DraftStats:
    """Entropy, most probable tokens and margin of each row's softmax at temperature 1 (C2T 4.1, equations 2-3).

    logits: (rows, vocab) any float dtype; -inf marks words that the draft vocabulary lacks.
    top_m: how many of the largest probabilities the entropy sums over, an int or one int32 in a tensor; >= vocab
        means the full entropy.
    k: how many tokens to return, 1 <= k <= vocab. The order of equal logits is not defined here; the kernel's is that
        of their ids.

    The sum is over the top_m probabilities as they are, not renormalised, as in the paper's equation 3.
    """
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
    ids = leading.indices[:, :k]
    # not torch.logsumexp, which has an infinity for rows that are marked with NaN
    log_sum_exp = logits.gather(1, ids[:, :1])[:, 0].float() - leading.values[:, 0]
    return DraftStats(ids, leading.values[:, :k], entropy, margin, log_sum_exp)
