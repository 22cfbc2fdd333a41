"""Where each chain of a batch ends: by confidence, by a budget of tokens."""

from __future__ import annotations

from torch import Tensor

__all__ = ["early_stop"]


def early_stop(
    confidence: Tensor,
    beta: Tensor | float,
    max_depth: Tensor | int,
    *,
    budget: Tensor | int | None = None,
    unclipped: Tensor | None = None,
    unknown: Tensor | None = None,
    links: Tensor | None = None,
) -> Tensor:
    """How many draft tokens of each chain the target verifies (C2T 5.5).

    confidence: (bs, d_max) float32 in [0, 1], confidence[:, i] of the token at depth i + 1; NaN where it is not known.
    beta: one number, or (bs,) float32: below it a token is dropped; equality keeps, and so does NaN.
    max_depth: one int, or (bs,) int32, longest chain of each request; 0 for a request that verifies its root alone.
    budget: draft tokens of the whole batch, roots not counted. The tokens of lowest confidence are dropped.
    unclipped: (bs,) int32, written: the lengths without the budget.
    unknown: (1,) int64, to which the number of NaN in `confidence` is added.
    links: (bs, more than d_max) int64, written: -1, no child, at the last token that is kept, the root being column 0.
    Returns (bs,) int32 in [0, max_depth].

    Raises ValueError or TypeError for a Python number beta that is not in [0, 1].

    Tokens are ordered by the smallest confidence on the way to them, so that a token never goes before one that it
    needs; of equals the shallower is better, then the one of the lower row. An unknown confidence counts as infinite.

    On a GPU: one launch. A number as beta or max_depth is one more launch, which fills a tensor with it.
    """
    if confidence.is_cuda:
        from c2t_kernels.stop import kernel

        return kernel.early_stop(
            confidence, beta, max_depth, budget=budget, unclipped=unclipped, unknown=unknown, links=links
        )
    from c2t_kernels.stop import reference

    return reference.early_stop(
        confidence, beta, max_depth, budget=budget, unclipped=unclipped, unknown=unknown, links=links
    )
