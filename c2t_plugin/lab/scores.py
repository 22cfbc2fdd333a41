"""How good a score is at telling accepted nodes from rejected ones, and what a threshold on it saves in chains."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from c2t_kernels import early_stop
from c2t_plugin.traces.file import Traces

THRESHOLD = 0.5
BETAS = tuple(round(0.05 * i, 2) for i in range(1, 20))


def auc(scores: Tensor, accepted: Tensor) -> float:
    """Probability that an accepted node scores higher than a rejected one, ties counting half; NaN without both.

    scores: (rows,) float. accepted: (rows,) bool.
    """
    positives = int(accepted.sum())
    negatives = len(accepted) - positives
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    mid_ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2
    rank_sum = mid_ranks[inverse[accepted]].sum().item()
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def weighted_auc(scores: Tensor, accepted: Tensor, owner: Tensor, weights: np.ndarray) -> np.ndarray:
    """auc() where each row counts as often as its prompt was drawn: (replicates,) float64.

    scores, accepted: (rows,). owner: (rows,) int64, column of weights. weights: (replicates, prompts).
    """
    values, inverse = scores.unique(return_inverse=True)
    place, hit, column = inverse.numpy(), accepted.numpy(), owner.numpy()
    found = np.empty(len(weights))
    for index, drawn in enumerate(weights):
        row = drawn[column]
        positives = np.bincount(place[hit], row[hit], minlength=len(values))
        negatives = np.bincount(place[~hit], row[~hit], minlength=len(values))
        below = negatives.cumsum() - negatives / 2
        found[index] = (positives * below).sum() / (positives.sum() * negatives.sum())
    return found


@dataclass(frozen=True)
class NodeScores:
    """Of all nodes of whole trees, pooled (C2T B.2).

    recall: share of the accepted nodes with a confidence of at least 0.5. theta: share of all nodes with such a
    confidence, the paper's positive rate. auc, bce (nats): of the confidence.
    auc_joint_prob: of P alone. recall_joint_prob: of P alone if as many nodes are taken, by the highest P.
    """

    recall: float
    theta: float
    auc: float
    bce: float
    auc_joint_prob: float
    recall_joint_prob: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 5) for name, value in asdict(self).items()}


def node_scores(logits: Tensor, joint_log_prob: Tensor, accepted: Tensor) -> NodeScores:
    """Judge a classifier on nodes, (rows,) each: its logits, float32; the nodes' log P, float32; the labels, bool."""
    predicted = torch.sigmoid(logits) >= THRESHOLD
    as_many = joint_log_prob.topk(int(predicted.sum())).indices
    positives = accepted.sum().clamp_min(1)
    return NodeScores(
        recall=float((predicted & accepted).sum() / positives),
        theta=float(predicted.float().mean()),
        auc=auc(logits, accepted),
        bce=float(F.binary_cross_entropy_with_logits(logits, accepted.float())),
        auc_joint_prob=auc(joint_log_prob, accepted),
        recall_joint_prob=float(accepted[as_many].sum() / positives),
    )


@dataclass(frozen=True)
class ChainYield:
    """What chains cost and bring, over the states that serving would visit.

    tau: accepted draft tokens per verification, bonus token not counted. gamma: verified draft tokens per
    verification. gamma_per_token: verified draft tokens per output token, bonus tokens counted as output.
    """

    tau: float
    gamma: float
    gamma_per_token: float


class ChainReplay:
    """Serves the recorded prompts again, greedily: after a verification that accepts a, the state a + 1 tokens later
    is the next, so that states inside an accepted run are skipped, as a server skips them."""

    def __init__(self, traces: Traces, d_max: int) -> None:
        """d_max: longest chain, at most the recorded depth."""
        self.d_max = d_max
        self.accepted = traces.chain.accepted[:, :d_max].int().cumprod(1).sum(1)
        self.traces = traces
        self.first = traces.first
        self.end = torch.cat([self.first[1:], torch.tensor([len(traces)])])

    def run(self, lengths: Tensor) -> ChainYield:
        """lengths: (states,) draft tokens that a policy would verify at each state."""
        accepted = torch.minimum(self.accepted, lengths)
        at, end = self.first, self.end
        steps = kept = hits = 0
        while len(at):
            steps += len(at)
            kept += int(lengths[at].sum())
            hits += int(accepted[at].sum())
            at = self.traces.following(at, accepted[at])
            at, end = at[at < end], end[at < end]
        return ChainYield(tau=hits / steps, gamma=kept / steps, gamma_per_token=kept / (hits + steps))

    def static(self, length: int) -> ChainYield:
        """Every chain has the same length."""
        return self.run(torch.full_like(self.accepted, length))

    def cut(self, scores: Tensor, threshold: float, keeps_failing: bool = False) -> ChainYield:
        """Every chain ends before its first token that scores below the threshold, or after it.

        scores: (states, >= d_max).
        """
        # as a tensor: a score need not be a probability, as beta has to be
        kept = early_stop(scores[:, : self.d_max], torch.tensor([threshold]), self.d_max).long()
        return self.run((kept + keeps_failing).clamp_max(self.d_max))

    def gamma_at(self, scores: Tensor, tau: float, points: int = 200) -> float:
        """Verified draft tokens per verification at a given tau, interpolated between thresholds; NaN out of reach.

        The thresholds are quantiles of the scores, so that they are as dense as the scores.
        """
        levels = np.unique(np.quantile(scores[:, : self.d_max].numpy(), np.linspace(0, 1, points)))
        found = sorted((self.cut(scores, float(level)) for level in levels), key=lambda y: (y.tau, y.gamma))
        taus, gammas = [y.tau for y in found], [y.gamma for y in found]
        return float(np.interp(tau, taus, gammas, left=np.nan, right=np.nan))


def suggest_beta(replay: ChainReplay, confidence: Tensor, static_length: int) -> float:
    """The largest beta of BETAS whose chains are accepted as long as static chains of static_length, or the smallest.

    A larger beta verifies fewer tokens, so this is the cheapest that costs no accept length.
    """
    wanted = replay.static(static_length).tau
    fitting = [beta for beta in BETAS if replay.cut(confidence, beta).tau >= wanted]
    return max(fitting, default=BETAS[0])
