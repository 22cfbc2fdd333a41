"""Chain mode: a request's draft ends before its first token of low confidence (C2T 5.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from c2t_kernels import ChainState, DraftStats, draft_stats, early_stop, score_chain
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.errors import ConfigError
from c2t_plugin.limits import RequestLimits


class DraftScorer(RequestLimits):
    """What scoring chains takes whatever an engine calls: limits, statistics of logits, and a record of them."""

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
        keep_log_prob: bool = False,
    ) -> None:
        """slots: request slots that may have limits of their own. rows: largest batch. max_depth: draft steps.
        keep_stats: for `stats`. keep_log_prob: for `sure`."""
        super().__init__(slots=slots, max_depth=max_depth, beta=beta, device=device)
        self.network = classifier.network(device)
        self.non_finite = torch.zeros(1, dtype=torch.int64, device=device)
        self._draft_stats = _statistics(rows, classifier.spec.top_m, torch.device(device))
        # joint log P, log P, entropy and margin of every token of the last draft
        self._stats = torch.zeros((rows, max_depth, 4), device=device) if keep_stats else None
        self._log_prob = torch.zeros((rows, max_depth), device=device) if keep_log_prob else None

    @property
    def shape(self) -> str:
        """For the log."""
        return f"chains of at most {self.d_max}"

    def forget(self) -> None:
        """Count what has no confidence from here."""
        self.non_finite.zero_()

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Score by these from the next draft on; see ScoringNetwork.take."""
        self.network.take(parameters)

    def stats(self, rows: int) -> Tensor | None:
        """(rows, d_max, 4) float32 copy of the last draft's joint log P, log P, entropy and margin, and what an
        earlier one left of steps that were not drafted; None unless they are kept."""
        return None if self._stats is None else self._stats[:rows].clone()

    def _statistics_of(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stats = self._draft_stats(logits)
        return stats.log_probs[:, 0], stats.entropy, stats.margin


class ChainScorer(DraftScorer):
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
        **keeps: bool,
    ) -> None:
        """slots: seeds are kept per request slot. For the rest see DraftScorer."""
        super().__init__(classifier, slots=slots, rows=rows, max_depth=max_depth, beta=beta, device=device, **keeps)
        self._slots = torch.zeros(rows, dtype=torch.int64, device=device)
        # A slot without a seed is NaN: its first token is kept.
        self._seeds = torch.full((3, slots), torch.nan, dtype=torch.float32, device=device)
        ids, log_prob = torch.zeros((slots, 1), dtype=torch.int64, device=device), self._seeds[0][:, None]
        self._seed_stats = DraftStats(ids, log_prob, self._seeds[1], self._seeds[2])
        self._state = ChainState.create(rows, max_depth, device)
        self._step = 0
        self._batch = 0

    def write_seed(self, slots: Tensor, logits: Tensor) -> None:
        """Keep the statistics of the first token of each request's next draft.

        slots: (n,) int64 request slots. logits: (n, draft_vocab) any float dtype.
        """
        self._draft_stats(logits, out=self._seed_stats, at=slots)

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

    def drafted(self, steps: int) -> None:
        """To be called before `end` where `begin` and `step` may have come out of a CUDA graph: how many tokens of a
        chain the draft has scored."""
        self._step = steps

    @property
    def scored(self) -> int:
        """Tokens of a chain that are scored."""
        return self._step

    @property
    def batch(self) -> int:
        """Requests of the draft at hand."""
        return self._batch

    def confidence(self, rows: int) -> Tensor:
        """(rows, steps scored) float32 view of the last draft's confidences; NaN where statistics were not finite."""
        return self._state.confidence[:rows, : self._step]

    def sure(self, rows: int) -> Tensor:
        """`confidence`, a view; where the logarithm of the draft's own probability of each token is kept, a tensor of
        its own with that beside it: (rows, steps scored, 2), where statistics are with entropy and margin: (.., 4)."""
        confidence = self.confidence(rows)
        if self._log_prob is None:
            return confidence
        if self._stats is not None:
            return torch.cat([confidence[..., None], self._stats[:rows, : self._step, 1:]], dim=-1)
        return torch.stack([confidence, self._log_prob[:rows, : self._step]], dim=-1)

    def joint_log_prob(self, rows: int) -> Tensor:
        """(rows,) float32 view: the logarithm of the draft's own probability of each whole chain."""
        return self._state.joint_log_prob[:rows]

    def stats(self, rows: int) -> Tensor | None:
        """(rows, steps scored, 4) of them."""
        return None if self._stats is None else self._stats[:rows, : self._step].clone()

    def own_beta(self, rows: int) -> Tensor:
        """(rows,) bool: `owns` of the first `rows` requests."""
        return self.owns(self._slots[:rows])

    def end(self, rows: int, links: Tensor | None = None) -> Tensor:
        """(rows,) int32: draft tokens to verify of the first `rows` requests; counts the ones without a confidence.
        links: see c2t_kernels.early_stop."""
        return self.lengths(rows, unknown=self.non_finite, links=links)

    def end_within(self, rows: int, budget: int, links: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `end`, and what is left of that where all rows together have at most `budget` draft tokens."""
        wanted = torch.empty(rows, dtype=torch.int32, device=self.beta.device)
        kept = self.lengths(rows, budget=budget, unclipped=wanted, unknown=self.non_finite, links=links)
        return wanted, kept

    def lengths(self, rows: int, **how: Any) -> Tensor:
        """As `end`, but that it counts nothing. how: see c2t_kernels.early_stop."""
        # Not captured, so that seven small operations can be left out where nobody has limits of their own.
        beta, depth = self.limits_of(self._slots[:rows]) if self.own_here else (self.beta, self.max_depth)
        return early_stop(self.confidence(rows), beta, depth, **how)

    def any_alive(self) -> bool:
        """Whether a chain of this batch may still grow. Asks the device, so not for a captured graph."""
        beta, depth = self.limits_of(self._slots[: self._batch])
        whole = early_stop(self.confidence(self._batch), beta, depth) == self._step
        return bool((whole & (depth > self._step)).any())

    def _score(self, log_prob: Tensor, entropy: Tensor, margin: Tensor) -> None:
        self._step += 1
        score_chain(self._state, self.network, log_prob, entropy, margin, self._step)
        if self._log_prob is not None:
            self._log_prob[: self._batch, self._step - 1] = log_prob
        if self._stats is not None:
            n = self._batch
            joint = self._state.joint_log_prob[:n]
            self._stats[:n, self._step - 1] = torch.stack((joint, log_prob, entropy, margin), dim=-1)


class _Statistics(Protocol):
    """c2t_kernels.draft_stats of the most probable token."""

    def __call__(self, logits: Tensor, *, out: DraftStats | None = None, at: Tensor | None = None) -> DraftStats: ...


def _statistics(rows: int, top_m: int, device: torch.device) -> _Statistics:
    if device.type == "cuda":
        return _fused_statistics(rows, top_m, device)
    return lambda logits, *, out=None, at=None: draft_stats(logits, top_m, out=out, at=at)


def _fused_statistics(rows: int, top_m: int, device: torch.device) -> _Statistics:
    """draft_stats into buffers for up to `rows` rows that all captured graphs share: the next call overwrites them."""
    from c2t_kernels.stats import kernel
    from c2t_kernels.stats.workspace import DraftStatsWorkspace

    workspace = DraftStatsWorkspace.create(rows, device)
    token_ids = torch.empty((rows, 1), dtype=torch.int64, device=device)
    log_probs = torch.empty((rows, 1), device=device)
    entropy, margin = torch.empty((2, rows), device=device)

    def statistics(logits: Tensor, *, out: DraftStats | None = None, at: Tensor | None = None) -> DraftStats:
        n = len(logits)
        if n > rows:
            return kernel.draft_stats(logits, top_m, out=out, at=at)
        out = out or DraftStats(token_ids[:n], log_probs[:n], entropy[:n], margin[:n])
        return kernel.draft_stats(logits, top_m, out=out, at=at, workspace=workspace)

    return statistics
