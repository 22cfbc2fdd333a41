"""Chain mode: a request's draft ends before its first token of low confidence (C2T 5.5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from c2t_kernels import ChainState, DraftStats, draft_stats, early_stop, score_chain
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.errors import ConfigError


class ChainScorer:
    """Confidence of every draft token of a batch of chains, across the steps of one draft.

    An engine calls, in this order: `write_seed` with the logits that the first draft token of the *next* draft is the
    argmax of; `begin` when that draft starts; `step` with the logits of each draft forward; `end`. The maths is that of
    c2t_kernels; here are the buffers of an engine around it. All state lives in buffers made once and nothing
    synchronises with the host, so `begin` and `step` can be captured in a CUDA graph.

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
        keep_stats: bool = False,
    ) -> None:
        """slots: seeds are kept per request slot. rows: largest batch. max_depth: draft steps. keep_stats: for
        `stats`."""
        self.network = classifier.network(device)
        self.d_max = max_depth
        self.beta = torch.empty(1, dtype=torch.float32, device=device)
        self.max_depth = torch.empty(1, dtype=torch.int32, device=device)
        self.non_finite = torch.zeros(1, dtype=torch.int64, device=device)
        # A request's own beta and longest chain; NaN and -1 where it has none.
        self._slot_beta = torch.full((slots,), torch.nan, dtype=torch.float32, device=device)
        self._slot_depth = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self._any_own = False
        self._slots = torch.zeros(rows, dtype=torch.int64, device=device)
        # A slot without a seed is NaN: its first token is kept.
        self._seeds = torch.full((3, slots), torch.nan, dtype=torch.float32, device=device)
        self._state = ChainState.create(rows, max_depth, device)
        self._draft_stats = _statistics(rows, classifier.spec.top_m, torch.device(device))
        # joint log P, log P, entropy and margin of every token of the last draft
        self._stats = torch.zeros((rows, max_depth, 4), device=device) if keep_stats else None
        self._step = 0
        self._batch = 0
        self.set_beta(beta)
        self.set_max_depth(max_depth)

    def set_beta(self, beta: float) -> None:
        """Change the threshold from the next draft on. Raises ConfigError unless it is in [0, 1]."""
        if not 0.0 <= beta <= 1.0:
            raise ConfigError(f"beta must be a number in [0, 1], got {beta}")
        self.beta.fill_(beta)

    def set_max_depth(self, max_depth: int) -> None:
        """Verify at most this many draft tokens per request; 0 verifies none. Raises ConfigError above d_max."""
        if not 0 <= max_depth <= self.d_max:
            raise ConfigError(f"max_depth must be between 0 and the draft steps ({self.d_max}), got {max_depth}")
        self.max_depth.fill_(max_depth)

    def set_requests(self, slots: Tensor, betas: Sequence[float | None], max_depths: Sequence[int | None]) -> None:
        """Give the requests in these slots ((n,) int64) their own beta and longest chain; None means the scorer's.

        To be called whenever a slot gets a new request. A longest chain above d_max is d_max.
        """
        if not self._any_own and all(value is None for value in (*betas, *max_depths)):
            return
        self._any_own = True
        own_beta = [math.nan if beta is None else beta for beta in betas]
        own_depth = [-1 if depth is None else depth for depth in max_depths]
        self._slot_beta[slots] = torch.tensor(own_beta, dtype=torch.float32).to(self.beta.device, non_blocking=True)
        self._slot_depth[slots] = torch.tensor(own_depth, dtype=torch.int32).to(self.beta.device, non_blocking=True)

    def write_seed(self, slots: Tensor, logits: Tensor) -> None:
        """Keep the statistics of the first token of each request's next draft.

        slots: (n,) int64 request slots. logits: (n, draft_vocab) any float dtype.
        """
        self._seeds[:, slots] = torch.stack(self._statistics_of(logits))

    def clear_seed(self, slots: Tensor) -> None:
        """Forget the seeds of these slots: the next draft's first token is kept, whatever it is."""
        self._seeds[:, slots] = torch.nan

    def begin(self, slots: Tensor) -> None:
        """Start a draft for the requests in these slots ((n,) int64) and score its first token."""
        self._batch = slots.shape[0]
        if self._batch > len(self._slots):
            raise ConfigError(f"batch of {self._batch} requests, buffers hold {len(self._slots)}")
        self._step = 0
        self._slots[: self._batch] = slots
        self._score(*self._seeds[:, slots])

    def step(self, logits: Tensor) -> None:
        """Score the next token of every chain from the logits it is the argmax of: (n or more rows, draft_vocab)."""
        self._score(*self._statistics_of(logits[: self._batch]))

    def confidence(self, rows: int) -> Tensor:
        """(rows, steps scored) float32 view of the last draft's confidences; NaN where statistics were not finite."""
        return self._state.confidence[:rows, : self._step]

    def stats(self, rows: int) -> Tensor | None:
        """(rows, steps scored, 4) float32 copy of the last draft's joint log P, log P, entropy and margin; None unless
        they are kept."""
        return None if self._stats is None else self._stats[:rows, : self._step].clone()

    def end(self, rows: int) -> Tensor:
        """(rows,) int32: draft tokens to verify of the first `rows` requests; counts the ones without a confidence."""
        confidence = self.confidence(rows)
        # The kernel counts too, but also the rows that only pad a captured batch.
        self.non_finite += confidence.isnan().sum()
        beta, depth = self._limits(rows)
        return early_stop(confidence, beta, depth)

    def any_alive(self) -> bool:
        """Whether a chain of this batch may still grow. Asks the device, so not for a captured graph."""
        beta, depth = self._limits(self._batch)
        whole = early_stop(self.confidence(self._batch), beta, depth) == self._step
        return bool((whole & (depth > self._step)).any())

    def _limits(self, rows: int) -> tuple[Tensor, Tensor]:
        beta, depth = self._slot_beta[self._slots[:rows]], self._slot_depth[self._slots[:rows]]
        beta = torch.where(beta.isnan(), self.beta, beta)
        # The server's own longest chain holds for every request: it is how an operator takes load off.
        return beta, torch.where(depth < 0, self.max_depth, torch.minimum(depth, self.max_depth))

    def _score(self, log_prob: Tensor, entropy: Tensor, margin: Tensor) -> None:
        self._step += 1
        # Which tokens are kept is decided in `end`, where requests have betas of their own.
        score_chain(self._state, self.network, log_prob, entropy, margin, self.beta, self._step)
        if self._stats is not None:
            n = self._batch
            joint = self._state.joint_log_prob[:n]
            self._stats[:n, self._step - 1] = torch.stack((joint, log_prob, entropy, margin), dim=-1)

    def _statistics_of(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stats = self._draft_stats(logits)
        return stats.log_probs[:, 0], stats.entropy, stats.margin


def _statistics(rows: int, top_m: int, device: torch.device) -> Callable[[Tensor], DraftStats]:
    """draft_stats of up to `rows` rows, on a GPU with a workspace of its own, which every captured graph shares."""
    if device.type != "cuda":
        return lambda logits: draft_stats(logits, top_m)
    from c2t_kernels.fused.stats import DraftStatsWorkspace
    from c2t_kernels.fused.stats import draft_stats as fused

    workspace = DraftStatsWorkspace.create(rows, device)
    return lambda logits: fused(logits, top_m, workspace=workspace if len(logits) <= rows else None)
