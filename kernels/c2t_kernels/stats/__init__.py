"""Statistics of draft distributions: most probable tokens, top-M entropy, margin."""

from __future__ import annotations

from torch import Tensor

from c2t_kernels.stats.result import DraftStats

__all__ = ["DraftStats", "draft_stats"]


def draft_stats(
    logits: Tensor,
    top_m: int | Tensor,
    k: int = 1,
    *,
    out: DraftStats | None = None,
    at: Tensor | None = None,
) -> DraftStats:
    """Entropy, most probable tokens and margin of each row's softmax at temperature 1 (C2T 4.1, equations 2-3).

    logits: (rows, vocab) any float dtype; -inf marks tokens that the draft vocabulary lacks.
    top_m: how many of the largest probabilities the entropy sums over, an int or one int32 in a tensor; >= vocab
        means the full entropy.
    k: how many tokens to return, 1 <= k <= vocab. The order of equal logits is not defined here; the kernel's is that
        of their ids.

    out: buffers to write, of the result's shapes and dtypes; else new ones.
    at: (rows,) int64, which row of `out` each row's result goes to, which then may have any number of rows. No row
        twice and none beyond it.

    The sum is over the top_m probabilities as they are, not renormalised, as in the paper's equation 3.

    On a GPU: c2t_kernels.stats.kernel also takes a workspace; equal logits come in id order.
    """
    if logits.is_cuda:
        from c2t_kernels.stats import kernel

        return kernel.draft_stats(logits, top_m, k, out=out, at=at)
    from c2t_kernels.stats import reference

    return reference.draft_stats(logits, top_m, k, out=out, at=at)
