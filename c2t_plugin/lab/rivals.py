"""Other rules' scores on the same traces: each a number per draft token, kept where it is at least a threshold.

Threshold on P and DyJoint (C2T v1 table 3) are one rule: the joint probability of the path. DyMax (same table) looks at
the token's own probability. They and the entropy stop (entropy-shaped trees, section 4: stop where H > 1) do not say
whether the token that failed is still verified, so both readings are here.

The closed forms are in no paper: P as it would be if the draft had been sharpened by one temperature for all drafts, by
first order on any path, and exactly where a token's siblings were recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from c2t_plugin.classifier import MIN_LOG_PROB
from c2t_plugin.errors import C2TError
from c2t_plugin.traces.forest import Forest


@dataclass(frozen=True)
class Rule:
    """name: as tables print it. score: (trees, nodes) float32 of a forest, larger is kept longer.
    keeps_failing: a chain verifies also the token that failed."""

    name: str
    score: Callable[[Forest], Tensor]
    keeps_failing: bool = False


def joint_prob(forest: Forest) -> Tensor:
    """Threshold on P, DyJoint: the logarithm of P orders as P does."""
    return forest.stats().joint_log_prob


def token_prob(forest: Forest) -> Tensor:
    """DyMax: the token's own probability, the largest of its distribution in a greedy chain."""
    return forest.stats().log_prob


def low_entropy(forest: Forest) -> Tensor:
    """Entropy early stop, negated."""
    return -forest.stats().entropy


# Chosen once, on the toy pair, for all drafts and pairs.
TEMPERATURE = 0.8
ENTROPY_WEIGHT = 1.0 - TEMPERATURE


def tempered(forest: Forest) -> Tensor:
    """log P plus ENTROPY_WEIGHT times the path's entropy: to first order TEMPERATURE times the logarithm of P with each
    factor raised to 1 / TEMPERATURE and renormalised."""
    stats = forest.stats()
    return torch.add(stats.joint_log_prob, ENTROPY_WEIGHT * stats.path_entropy)


def sharpened(forest: Forest, temperature: float = TEMPERATURE) -> Tensor:
    """(trees, nodes) log of the product, from the root, of p^(1/T) over its sum with the node's recorded siblings."""
    listed = forest.log_prob.view(len(forest), -1, forest.k) / temperature
    own = listed.log_softmax(dim=2)
    joint = torch.zeros_like(own)
    for column in range(own.shape[1]):
        parent = forest.parent_ids[:, column].long()
        above = joint.flatten(1).gather(1, parent.clamp_min(0)[:, None])
        joint[:, column] = own[:, column] + torch.where(parent[:, None] < 0, 0.0, above)
    return joint.flatten(1).clamp_min(MIN_LOG_PROB)


JOINT_PROB = Rule("P", joint_prob)
TEMPERED = Rule("log P + .2 path entropy", tempered)
CHAIN_RIVALS = (
    JOINT_PROB,
    Rule("P, failing kept", joint_prob, keeps_failing=True),
    Rule("DyMax", token_prob),
    Rule("DyMax, failing kept", token_prob, keeps_failing=True),
    Rule("entropy", low_entropy),
    Rule("entropy, failing kept", low_entropy, keeps_failing=True),
)

# Logarithms of what stands for a probability; a chain's tokens have no siblings.
CHAIN_FORMS = (TEMPERED,)
TREE_FORMS = (TEMPERED, Rule("P among siblings at .8", sharpened))


def own_logit(log_prob: Tensor) -> Tensor:
    """logit(q) of each token, its logit minus the log-sum-exp of all others: any shape, float64, clamped to +-40."""
    log_prob = log_prob.double()
    return (log_prob - torch.log(-torch.expm1(log_prob.clamp_max(-1e-18)))).clamp(-40.0, 40.0)


class OnlineLogistic:
    """vLLM's acceptance estimator (OnlineAcceptanceEstimator of vLLM 0.32): sigmoid(slope * logit(q) + bias[position])
    is the chance that a token is accepted if all before it were; the product down the chain is that of the token.

    One slope for all positions, one bias each, from slope 0.5 and bias -0.2. Every 100 verification steps comes one
    Newton step on these steps alone, with a ridge of 1e-3, each parameter damped by n / (n + 50) for n observations;
    a step that is NaN or would make the slope negative is left out. A position is observed where the chain was accepted
    up to it. All drafts are verified whole here, where the engine, once warm, learns only from what it did not cut.
    """

    REFIT_INTERVAL = 100
    DAMPING = 50.0
    RIDGE = 1e-3
    FIRST_SLOPE = 0.5
    FIRST_BIAS = -0.2

    def __init__(self, positions: int) -> None:
        self.slope = self.FIRST_SLOPE
        self.bias = torch.full((positions,), self.FIRST_BIAS, dtype=torch.float64)

    def conditional(self, log_prob: Tensor) -> Tensor:
        """(rows, positions) acceptance probability of each token given that all before it are accepted, float64."""
        return torch.sigmoid(self.slope * own_logit(log_prob) + self.bias[: log_prob.shape[1]])

    def learn(self, log_prob: Tensor, accepted: Tensor) -> None:
        """One refit. log_prob, accepted: (rows, positions) of the drafts verified since the last one, in any order."""
        feature, predicted = own_logit(log_prob), self.conditional(log_prob)
        reached = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=1).double().cumprod(1)
        weight = predicted * (1 - predicted) * reached
        residual = (accepted.double() - predicted) * reached
        coupling, curvature = (weight * feature).sum(0), weight.sum(0) + self.RIDGE
        gradient, seen = residual.sum(0), reached.sum(0)
        # the biases are eliminated: what is left of the slope's equation once each bias has taken its own best step
        slope_gradient = (residual * feature).sum() - (coupling * gradient / curvature).sum()
        slope_curvature = (weight * feature**2).sum() + self.RIDGE - (coupling**2 / curvature).sum()
        step = float(slope_gradient / slope_curvature * seen.sum() / (seen.sum() + self.DAMPING))
        if not self.slope + step >= 0.0:
            step = 0.0
        self.slope += step
        bias_step = (gradient - coupling * step) / curvature * seen / (seen + self.DAMPING)
        self.bias = torch.where(bias_step.isnan(), self.bias, self.bias + bias_step)

    def fit(self, chain: Forest, positions: int, batch: int) -> OnlineLogistic:
        """Read recorded chains in order, `batch` of them verified per step, and return self.

        A rest shorter than an interval is not learnt from. C2TError if there is no whole interval.
        """
        rows = self.REFIT_INTERVAL * batch
        if len(chain) < rows:
            raise C2TError(f"the estimator refits after {rows} drafts, the traces hold {len(chain)}; record more")
        for start in range(0, len(chain) - rows + 1, rows):
            window = slice(start, start + rows)
            self.learn(chain.log_prob[window, :positions], chain.accepted[window, :positions])
        return self

    def fit_whole(self, chain: Forest, positions: int, rounds: int = 50) -> OnlineLogistic:
        """The same model at its optimum: the same Newton step on all chains at once, again and again."""
        for _ in range(rounds):
            self.learn(chain.log_prob[:, :positions], chain.accepted[:, :positions])
        return self

    def survival(self, chain: Forest) -> Tensor:
        """(rows, positions) log probability that a chain is accepted up to each of its tokens."""
        return self.conditional(chain.log_prob).log().cumsum(1).float()
