"""Chain mode: a request's draft ends before its first token of low confidence (C2T 5.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_kernels import draft_stats
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.errors import ConfigError
from c2t_plugin.features import NodeStats
from c2t_plugin.policies.limits import RequestLimits


def kept_lengths(confidence: Tensor, beta: Tensor | float, max_depth: Tensor | int) -> Tensor:
    """How many draft tokens of each chain the target verifies.

    confidence: (rows, d_max) float32, confidence[:, i] of the token at depth i + 1; NaN where it is not known.
    beta: below it a token is dropped; equality keeps, and so does NaN. A tensor must broadcast against confidence.
    max_depth: longest chain to verify, one for all or (rows,).
    Returns (rows,) int32 in [0, max_depth]: the chain ends before its first dropped token.
    """
    kept = ~(confidence < beta)
    return kept.int().cumprod(dim=-1).sum(dim=-1).clamp(max=max_depth).int()


class ChainScorer(RequestLimits):
    """Confidence of every draft token of a batch of chains, across the steps of one draft.

    An engine calls, in this order: `write_seed` with the logits that the first draft token of the *next* draft is the
    argmax of; `begin` when that draft starts; `step` with the logits of each draft forward; `end`. All state lives in
    buffers made once and nothing synchronises with the host, so `begin` and `step` can be captured in a CUDA graph.

    P is P_{d-1} * max q_d: the paper's (equation 1) when the draft is greedy, and lossless also where a draft token
    was sampled, since it does not depend on the token drawn.
    """

    def __init__(
        self,
        classifier: NodeClassifier,
        *,
        slots: int,
        rows: int,
        max_depth: int,
        beta: float,
        device: torch.device | str,
    ) -> None:
        """slots: seeds are kept per request slot. rows: largest batch. max_depth: draft steps."""
        self.classifier = classifier.to(device)
        self.top_m = classifier.spec.top_m
        super().__init__(slots=slots, max_depth=max_depth, beta=beta, device=device)
        self.non_finite = torch.zeros(1, dtype=torch.int64, device=device)
        self._slots = torch.zeros(rows, dtype=torch.int64, device=device)
        # A slot without a seed is NaN: its first token is kept.
        self._seeds = torch.full((3, slots), torch.nan, dtype=torch.float32, device=device)
        self._joint = torch.zeros(rows, dtype=torch.float32, device=device)
        self._confidence = torch.full((rows, max_depth), torch.nan, dtype=torch.float32, device=device)
        self._step = 0
        self._batch = 0

    def write_seed(self, slots: Tensor, logits: Tensor) -> None:
        """Keep the statistics of the first token of each request's next draft.

        slots: (n,) int64 request slots. logits: (n, draft_vocab) any float dtype.
        """
        self._seeds[:, slots] = torch.stack(_row_stats(logits, self.top_m))

    def clear_seed(self, slots: Tensor) -> None:
        """Forget the seeds of these slots: the next draft's first token is kept, whatever it is."""
        self._seeds[:, slots] = torch.nan

    def begin(self, slots: Tensor) -> None:
        """Start a draft for the requests in these slots ((n,) int64) and score its first token."""
        self._batch = slots.shape[0]
        if self._batch > self._confidence.shape[0]:
            raise ConfigError(f"batch of {self._batch} requests, buffers hold {self._confidence.shape[0]}")
        self._step = 0
        self._slots[: self._batch] = slots
        self._joint[: self._batch] = 0.0
        self._score(*self._seeds[:, slots])

    def step(self, logits: Tensor) -> None:
        """Score the next token of every chain from the logits it is the argmax of: (n or more rows, draft_vocab)."""
        self._score(*_row_stats(logits[: self._batch], self.top_m))

    def confidence(self, rows: int) -> Tensor:
        """(rows, steps scored) float32 view of the last draft's confidences; NaN where statistics were not finite."""
        return self._confidence[:rows, : self._step]

    def end(self, rows: int) -> Tensor:
        """(rows,) int32: draft tokens to verify of the first `rows` requests; counts the ones without a confidence."""
        confidence = self.confidence(rows)
        self.non_finite += confidence.isnan().sum()
        beta, depth = self.limits_of(self._slots[:rows])
        return kept_lengths(confidence, beta[:, None], depth)

    def _score(self, log_prob: Tensor, entropy: Tensor, margin: Tensor) -> None:
        n, depth = self._batch, self._step + 1
        finite = torch.isfinite(log_prob) & torch.isfinite(entropy)
        # An unknown probability counts as 1, so that it does not spoil the rest of the chain.
        self._joint[:n] += torch.where(finite, log_prob, 0.0)
        joint = self._joint[:n]
        depths = torch.full_like(joint, float(depth))
        stats = NodeStats(joint, log_prob, entropy, depths, rank=torch.zeros_like(joint), margin=margin)
        self._confidence[:n, self._step] = torch.where(finite, self.classifier.confidence(stats), torch.nan)
        self._step = depth


def _row_stats(logits: Tensor, top_m: int) -> tuple[Tensor, Tensor, Tensor]:
    stats = draft_stats(logits, top_m)
    return stats.log_probs[:, 0], stats.entropy, stats.margin
