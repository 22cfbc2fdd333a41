"""What a planner has learnt of a classifier's confidences, applied. See calibration.py for how it is learnt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.planner.arrays import Array, sigmoid
from c2t_plugin.planner.budget import falling_of

# Chances are taken no nearer to 0 and 1, and the draft's own logit no further from 0.
NEAREST, FURTHEST = 1e-2, 20.0


class Learnt(NamedTuple):
    """logit' = slope * logit + own * the draft's logit + offset[depth], of a token's chance if all before it were
    accepted. offsets: (d_max,) float64. seen: draft tokens that it comes from. precision: (2 + d_max, 2 + d_max), how
    sure these numbers are in this order; None: as sure as `seen` makes them."""

    slope: float
    own: float
    offsets: Tensor
    seen: int = 0
    precision: Array | None = None

    @classmethod
    def nothing(cls, d_max: int) -> Learnt:
        """What the classifier says."""
        return cls(1.0, 0.0, torch.zeros(d_max, dtype=torch.float64))

    @property
    def weights(self) -> Array:
        """(2 + d_max,) float64, in the order of `precision`."""
        return np.array([self.slope, self.own, *self.offsets.numpy()])

    def given(self, features: Array) -> Array:
        """(drafts, depths) each token's chance if all before it are accepted, of (drafts, depths, 2) features."""
        offsets = self.offsets.numpy()[: features.shape[1]]
        return sigmoid(self.slope * features[..., 0] + self.own * features[..., 1] + offsets)


def confidence_of(sure: Tensor) -> tuple[Tensor, Tensor | None]:
    """Confidences, and log probabilities where they are known. sure: (drafts, depths), or (drafts, depths, 2 or more)
    with both in front."""
    return (sure, None) if sure.dim() == 2 else (sure[..., 0], sure[..., 1])


def features_of(confidence: Tensor, log_prob: Tensor | None) -> Array:
    """(drafts, depths, 2) float64: the logit of each token's chance if all before it are accepted, by the classifier,
    and by the draft itself; 0 where that is not known."""
    chain = falling_of(confidence.double().numpy())
    above = np.ones_like(chain)
    above[:, 1:] = chain[:, :-1]
    given = np.divide(chain, above, out=np.zeros_like(chain), where=above > 0)
    given = np.minimum(np.maximum(given, NEAREST), 1 - NEAREST)
    found = np.zeros((*chain.shape, 2))
    found[..., 0] = np.log(given / (1 - given))
    if log_prob is not None:
        likely = np.minimum(log_prob.double().numpy(), -1e-9)
        own = likely - np.log(-np.expm1(likely))
        own[np.isnan(own)] = 0.0
        found[..., 1] = np.minimum(np.maximum(own, -FURTHEST), FURTHEST)
    return found


def chance(learnt: Learnt, features: Array) -> Array:
    """(drafts, depths) chance that a draft is accepted up to each of its tokens."""
    return np.cumprod(learnt.given(features), axis=1)


def nll(chance: Array, hit: Array) -> Array:
    """Nats of each outcome, any shape. hit: bool, whether what had this chance came."""
    return -np.log(np.maximum(np.where(hit, chance, 1 - chance), 1e-9))


def lost(chance: Array, hit: Array, known: Array) -> Array:
    """(..., drafts) nats of each draft's outcome, of its (..., drafts, depths) tokens that are known."""
    return np.where(known, nll(chance, hit), 0.0).sum(-1)
