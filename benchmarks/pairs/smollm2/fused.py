"""Cross-entropy of a fixed LM head's logits against distributions, chunk by chunk, so that logits stay in the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 256


class HeadCrossEntropy(torch.autograd.Function):
    """Mean over states of the cross-entropy (nats) of softmax(states @ lm_head.T) against each state's target.

    states: [n, hidden]. lm_head: [draft vocabulary, hidden], not trained. targets: [distributions, draft vocabulary],
    each sums to 1. picks: int64 [n], which of the targets is the state's. Products are computed in bfloat16, the
    softmax in float32. The gradient is made beside the loss, so no logits are kept.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, lm_head: Tensor, targets: Tensor, picks: Tensor) -> Tensor:
        low, rows = lm_head.bfloat16(), states.bfloat16()
        total = torch.zeros((), device=states.device)
        gradient = torch.empty_like(rows)
        for begin in range(0, len(rows), CHUNK):
            part = slice(begin, begin + CHUNK)
            wanted = targets.index_select(0, picks[part]).float()
            logits = (rows[part] @ low.T).float()
            logits -= logits.logsumexp(-1, keepdim=True)
            total -= torch.dot(logits.flatten(), wanted.flatten())
            gradient[part] = logits.exp_().sub_(wanted).bfloat16() @ low
        ctx.save_for_backward(gradient)
        ctx.kind = states.dtype
        return total / len(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * (grads[0] / len(gradient))).to(ctx.kind), None, None, None


def head_cross_entropy(states: Tensor, lm_head: Tensor, targets: Tensor, picks: Tensor) -> Tensor:
    """See HeadCrossEntropy."""
    return HeadCrossEntropy.apply(states, lm_head, targets, picks)
