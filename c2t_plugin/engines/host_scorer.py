"""Chains scored on the host: ChainScorer's arithmetic for an engine on a CPU, where dispatching costs more than adding.

A draft step of a small model takes a few milliseconds there. torch needs some sixty operations of a microsecond or more
to score it, and 60 us a row to find the M largest of 8,192 logits; numpy takes a sixth of that for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from c2t_kernels.network import PathSums, ScoringNetwork
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.engines.row_limits import RowLimits
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner.features import VALUES, PathNode, extended
from c2t_plugin.planner.network import Network

Array = np.ndarray[Any, np.dtype[Any]]
# Its negative's exp is 0 as float32, and 0 times it is 0, where 0 times inf would be NaN.
_FAR = np.float32(200.0)
# Of logits that are not numbers.
_QUIET: Any = {"invalid": "ignore", "divide": "ignore", "over": "ignore"}


class HostStats(NamedTuple):
    """As c2t_kernels.DraftStats for the most probable token alone; each (rows,), float32 but for the ids, or None."""

    token_ids: Array | None
    log_prob: Array
    entropy: Array
    margin: Array


class HostNetwork:
    """The classifier for chains: scale and shift folded into its weights, and what depth and rank add into its bias."""

    def __init__(self, network: ScoringNetwork, max_depth: int) -> None:
        shift, scale, weight, bias = (
            each.double().numpy() for each in (network.shift, network.scale, network.hidden_weight, network.hidden_bias)
        )
        folded = weight / scale
        constants = np.zeros((max_depth, len(network.features)))
        if "depth" in network.features:
            constants[:, network.features.index("depth")] = np.arange(max_depth) + network.depth_origin
        # of depth i + 1
        biases = ((constants - shift) @ folded.T + bias).astype(np.float32)
        known = [(place, VALUES[name]) for place, name in enumerate(network.features)]
        self._values = [value for _, value in known if value is not None]
        inward = folded[:, [place for place, value in known if value is not None]].astype(np.float32)
        outward = network.out_weight.numpy().copy(), network.out_bias.numpy().copy()
        self._networks = [Network(inward, each, *outward) for each in biases]

    def confidence(self, node: PathNode, column: int) -> Array:
        """(rows,) float32 of tokens at depth column + 1."""
        features = np.empty((len(node.joint_log_prob), len(self._values)), dtype=np.float32)
        for place, value in enumerate(self._values):
            features[:, place] = value(node)
        return self._networks[column].confidence(features)


def host_stats(logits: Array, top_m: int, room: Array | None = None) -> HostStats:
    """c2t_kernels.draft_stats, which says what it computes, of (rows, vocab) float32 logits in numpy.

    room: (2, at least rows, vocab) float32 to work in, since a fresh page costs more than what is written to it.
    """
    rows, vocab = logits.shape
    below, weights = np.empty((2, rows, vocab), dtype=np.float32) if room is None else room[:, :rows]
    ids = logits.argmax(axis=-1)
    top = logits[np.arange(rows), ids]
    many = min(top_m, vocab)
    np.subtract(top[:, None], logits, out=below)
    if many < vocab:
        # how far below the largest: from the small end, since the other is slow where many tokens are -inf
        below.partition(many - 1, axis=-1)
    np.exp(np.negative(below, out=weights), out=weights)
    total = weights.sum(axis=-1)
    log_total = np.log(total)
    nearest, weights = below[:, :many], weights[:, :many]
    # NaN in all of a row that has no statistics
    margin = _margin(nearest if many > 1 else below) + (log_total - log_total)
    np.minimum(nearest, _FAR, out=nearest)
    entropy = (log_total * weights.sum(axis=-1) + np.einsum("rv,rv->r", weights, nearest)) / total
    return HostStats(ids, -log_total, entropy, margin)


def _margin(below: Array) -> Array:
    """(rows,) of the second smallest of (rows, n) distances, the smallest being 0; 0 of one token."""
    rows = np.arange(len(below))
    first = below.argmin(axis=-1)
    zero = below[rows, first]
    if below.shape[1] == 1:
        return zero
    below[rows, first] = np.inf
    margin: Array = below.min(axis=-1)
    below[rows, first] = zero
    return margin


class HostStatistics:
    """host_stats of an engine's logits, in room that is made once."""

    def __init__(self, rows: int, top_m: int) -> None:
        """rows: of the largest batch."""
        self._top_m = top_m
        self._room = np.empty((2, rows, 0), dtype=np.float32)

    def __call__(self, logits: Tensor) -> HostStats:
        """Of (rows, draft_vocab) logits, any float dtype."""
        known = logits.detach().float().numpy()
        rows, vocab = known.shape
        if vocab != self._room.shape[2] or rows > self._room.shape[1]:
            self._room = np.empty((2, max(rows, self._room.shape[1]), vocab), dtype=np.float32)
        # -inf less -inf is NaN, as it should be
        with np.errstate(**_QUIET):
            return host_stats(known, self._top_m, self._room)


def extend(network: HostNetwork, joint: Array, path: Array, stats: HostStats, column: int) -> Array:
    """(rows,) float32 confidences of chains' tokens at depth column + 1; NaN where statistics are not finite.

    joint, path: (rows,) float32 sums of the chains so far, to which the tokens are added.
    """
    (joint[:], path[:]), known = extended(PathSums(joint, path), stats.log_prob, stats.entropy)
    with np.errstate(**_QUIET):
        found = network.confidence(PathNode(joint, path, stats.log_prob, stats.entropy, stats.margin), column)
    return np.where(known, found, np.nan).astype(np.float32, copy=False)


class HostScorer(RowLimits):
    """Confidence of every draft token of a batch of chains, step by step, and where each chain ends.

    An engine calls `score` with the logits of each draft step and `end`; the numbers are those of ChainScorer within
    float32 rounding.
    """

    def __init__(
        self, classifier: NodeClassifier, *, rows: int, max_depth: int, beta: float, keep_stats: bool = False
    ) -> None:
        """rows: largest batch. max_depth: draft steps. keep_stats: for `stats`."""
        super().__init__(slots=rows, max_depth=max_depth, beta=beta, device="cpu")
        self.non_finite = 0
        self._statistics = HostStatistics(rows, classifier.spec.top_m)
        self.network = classifier.network("cpu")
        self._network = HostNetwork(self.network, max_depth)
        self._joint, self._path = np.zeros((2, rows), dtype=np.float32)
        self._confidence = np.full((rows, max_depth), np.nan, dtype=np.float32)
        self._log_prob = np.full((rows, max_depth), np.nan, dtype=np.float32)
        self._kept, self._alive = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=bool)
        self._limits: tuple[Any, ...] = beta, max_depth
        self._stats = np.zeros((rows, max_depth, 4), dtype=np.float32) if keep_stats else None
        self._step = self._batch = 0

    def forget(self) -> None:
        """Count what has no confidence from here."""
        self.non_finite = 0

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Score by these from the next draft on; see ScoringNetwork.take."""
        self.network.take(parameters)
        self._network = HostNetwork(self.network, self.d_max)

    def score(self, logits: Tensor, *, first: bool) -> Tensor:
        """Score the next token of every chain: the (rows,) int64 argmax of (rows, draft_vocab) logits, any float dtype.

        first: of a new draft, whose batch this one is.
        """
        if first:
            self._begin(logits.shape[0])
        stats = self._statistics(logits[: self._batch])
        self._extend(stats)
        return torch.from_numpy(stats.token_ids)

    def _begin(self, rows: int) -> None:
        if rows > len(self._kept):
            raise ConfigError(f"batch of {rows} requests, buffers hold {len(self._kept)}")
        self._batch, self._step = rows, 0
        self._joint[:rows] = self._path[:rows] = 0.0
        self._kept[:rows], self._alive[:rows] = 0, True
        if self.own_here:
            self._limits = tuple(each.numpy() for each in self.limits_of(self._rows[:rows]))
        else:
            self._limits = float(self.beta), int(self.max_depth)

    def _extend(self, stats: HostStats) -> None:
        n, column = self._batch, self._step
        self._step += 1
        joint, path, alive = self._joint[:n], self._path[:n], self._alive[:n]
        confidence = extend(self._network, joint, path, stats, column)
        self.non_finite += int(np.count_nonzero(np.isnan(confidence)))
        self._confidence[:n, column] = confidence
        self._log_prob[:n, column] = stats.log_prob
        if self._stats is not None:
            self._stats[:n, column] = np.stack((joint, stats.log_prob, stats.entropy, stats.margin), axis=-1)
        beta, depth = self._limits
        # a confidence that is not known keeps its token
        alive &= ~(confidence < beta) & (depth > column)
        self._kept[:n] += alive

    def any_alive(self) -> bool:
        """Whether a chain of this batch may still grow."""
        return bool((self._alive[: self._batch] & (self._limits[1] > self._step)).any())

    def newest(self) -> tuple[list[float], list[float]]:
        """Of each request of the batch its newest token's `confidence` and `log_prob`."""
        n, column = self._batch, self._step - 1
        return self._confidence[:n, column].tolist(), self._log_prob[:n, column].tolist()

    def confidence(self, rows: int) -> Tensor:
        """(rows, steps scored) float32 copy of the last draft's confidences; NaN where statistics were not finite."""
        return torch.from_numpy(self._confidence[:rows, : self._step].copy())

    def log_prob(self, rows: int) -> Tensor:
        """(rows, steps scored) float32 copy of the logarithm of the draft's own probability of each token."""
        return torch.from_numpy(self._log_prob[:rows, : self._step].copy())

    def stats(self, rows: int) -> Tensor | None:
        """(rows, steps scored, 4) float32 copy of the last draft's joint log P, log P, entropy and margin; None unless
        they are kept."""
        return None if self._stats is None else torch.from_numpy(self._stats[:rows, : self._step].copy())

    def end(self, rows: int) -> Tensor:
        """(rows,) int64: draft tokens to verify of the first `rows` requests."""
        return torch.from_numpy(self._kept[:rows])
