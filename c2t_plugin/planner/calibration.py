"""What the classifier's confidences mean on this server: learnt from what its target accepts, with them as the prior.

A classifier was fitted on some pair. On another, or on other text, it ranks draft tokens well and is wrong about how
many are accepted. Two things mend that: a slope for all, and an offset for each depth, on the logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

# Draft tokens that are looked back on, and that come between two fits: fewer at the beginning.
WINDOW = 4096
FIT_EVERY, FIRST_FIT = 256, 64
# Iterations of Newton's method: the fit before is where they start.
ITERATIONS = 4
# Inverse variances: of the slope around 1, of an offset around 0. As much as some ten tokens say.
SLOPE_PRIOR, OFFSET_PRIOR = 4.0, 2.0
# Confidences are taken no nearer to 0 and 1.
NEAREST = 1e-4


class Calibration:
    """logit' = slope * logit + offset[depth], fitted to the verified draft tokens of the last steps.

    Only verified tokens are evidence. Whether one is verified follows from its confidence, which the fit has, and not
    from its outcome, so the cut does not bend it. Tokens of sampled requests count: that is how often they are
    accepted. A step's outcome changes later steps only.

    Each window judges the fit before it, by tokens that it had not seen: where the classifier's own confidences
    predicted them better, they hold until the next fit.
    """

    def __init__(self, d_max: int) -> None:
        self.seen = 0
        self.slope = 1.0
        self.offsets = torch.zeros(d_max, dtype=torch.float64)
        # mean negative log likelihood of the newest tokens: by the classifier's confidences, and by these
        self.nll: tuple[float, float] | None = None
        self._logits = torch.zeros(WINDOW, dtype=torch.float64)
        self._depths = torch.zeros(WINDOW, dtype=torch.int64)
        self._accepted = torch.zeros(WINDOW, dtype=torch.float64)
        self._since = 0

    def __call__(self, confidence: Tensor) -> Tensor:
        """(requests, drafted) float64 in [0, 1] of (requests, drafted) confidences; NaN stays."""
        if not self.seen:
            return confidence.double()
        offsets = self.offsets[: confidence.shape[1]]
        return torch.sigmoid(self.slope * _logit(confidence) + offsets)

    def observe(self, confidence: Tensor, verified: Tensor, accepted: Tensor) -> None:
        """The outcome of a step. confidence: (requests, drafted), as it was. verified, accepted: (requests,) int64
        draft tokens of each."""
        depth = torch.arange(confidence.shape[1]).expand(confidence.shape)
        known = (depth < verified[:, None]) & confidence.isfinite()
        count = int(known.sum())
        if not count:
            return
        place = (self.seen + torch.arange(count)) % WINDOW
        self._logits[place] = _logit(confidence[known])
        self._depths[place] = depth[known]
        self._accepted[place] = (depth < accepted[:, None])[known].double()
        self.seen += count
        self._since += count
        if self._since >= min(FIT_EVERY, max(FIRST_FIT, self.seen // 4)):
            self._fit()

    def state(self) -> dict[str, Any]:
        """As JSON. seen: draft tokens. nll: nats a token, [of the classifier's own confidences, of these]."""
        return {
            "seen": self.seen,
            "slope": self.slope,
            "offsets": self.offsets.tolist(),
            "nll": None if self.nll is None else list(self.nll),
        }

    def _fit(self) -> None:
        size = min(self.seen, WINDOW)
        new = min(self._since, size)
        newest = (self.seen - new + torch.arange(new)) % WINDOW
        raw, fitted = (
            float(cross_entropy(logits[newest], self._accepted[newest]))
            for logits in (self._logits, self._predicted(self.slope, self.offsets))
        )
        self.nll = raw, fitted
        self._since = 0
        if self.seen > FIT_EVERY * 2 and fitted > raw + 0.05:
            # what was learnt predicts worse than what it started from
            self.slope, self.offsets = 1.0, torch.zeros_like(self.offsets)
            return
        self.slope, self.offsets = self._newton(size)

    def _predicted(self, slope: float, offsets: Tensor) -> Tensor:
        return slope * self._logits + offsets[self._depths]

    def _newton(self, size: int) -> tuple[float, Tensor]:
        """The most likely slope and offsets given the window's tokens and the prior."""
        depths = len(self.offsets)
        features = torch.zeros(size, depths + 1, dtype=torch.float64)
        features[:, 0] = self._logits[:size]
        features[torch.arange(size), self._depths[:size] + 1] = 1.0
        accepted = self._accepted[:size]
        prior = torch.tensor([1.0] + [0.0] * depths, dtype=torch.float64)
        precision = torch.tensor([SLOPE_PRIOR] + [OFFSET_PRIOR] * depths, dtype=torch.float64)
        weights = torch.cat([torch.tensor([self.slope], dtype=torch.float64), self.offsets])
        for _ in range(ITERATIONS):
            expected = torch.sigmoid(features @ weights)
            gradient = features.T @ (accepted - expected) - precision * (weights - prior)
            curvature = (features.T * (expected * (1 - expected))) @ features + torch.diag(precision)
            # damped: a step of more than 2 on the logit is no longer where the quadratic form holds
            weights = weights + torch.linalg.solve(curvature, gradient).clamp(-2.0, 2.0)
        # a slope below 0 would take the least likely tokens first
        return max(float(weights[0]), 0.05), weights[1:]


def _logit(confidence: Tensor) -> Tensor:
    return torch.logit(confidence.double(), eps=NEAREST)
