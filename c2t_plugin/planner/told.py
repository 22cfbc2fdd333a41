"""What a calibration tells of itself where somebody asks: a server's state, its metrics and its log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from c2t_plugin.planner.fitting import fitted, prior_of
from c2t_plugin.planner.learnt import NEAREST, Learnt, nll

if TYPE_CHECKING:
    from c2t_plugin.planner.calibration import Calibration

# A slope of `joint` below it would take the least likely tokens first.
LEAST_SLOPE = 0.05


def state_of(calibration: Calibration) -> dict[str, Any]:
    """As JSON. applied: whether confidences are taken for it. seen: draft tokens. discarded: fits that predicted worse,
    turns: because the traffic is another. joint: see `joint`. nll: nats a token, auc: of the window's verified tokens,
    [of the classifier's own confidences, of what was learnt before each came]. depths: of these tokens by depth, how
    many, the share that was accepted, and the mean that was expected, by classifier and by what was learnt."""
    known, hit, foretold = calibration.window()
    both = [expected[known].clamp(1e-6, 1 - 1e-6) for expected in foretold]
    tokens = hit[known]
    mixed = bool(tokens.any()) and not bool(tokens.all())
    depths = [
        _at(known[:, depth], hit[:, depth].double(), *(each[:, depth] for each in foretold))
        for depth in range(known.shape[1])
    ]
    learnt, last = calibration.learnt, joint(calibration)
    return {
        "applied": calibration.applied,
        "seen": calibration.seen,
        "slope": learnt.slope,
        "own": learnt.own,
        "offsets": learnt.offsets.tolist(),
        "joint": {"slope": max(last.slope, LEAST_SLOPE), "offsets": last.offsets.tolist()},
        "discarded": calibration.discarded,
        "turns": calibration.turns,
        "nll": [float(nll(each, tokens).mean()) for each in both] if len(known) else None,
        "auc": [auc(each, tokens) for each in both] if mixed else None,
        "depths": depths,
    }


def joint(calibration: Calibration) -> Learnt:
    """What is learnt with nothing but a slope and offsets on the logit of each draft's lowest confidence so far, for
    the chance that a token *and* all before it are accepted: what a classifier's last layer can hold."""
    known, hit, foretold = calibration.window()
    chance = torch.logit(foretold[0], eps=NEAREST**2)
    features = torch.stack([chance, torch.zeros_like(chance)], dim=-1)
    nothing = Learnt.nothing(known.shape[1])
    return fitted(nothing, prior_of(nothing), features, known, hit, calibration.seen)


def _at(known: Tensor, hit: Tensor, classifier: Tensor, learnt: Tensor) -> dict[str, Any]:
    tokens = int(known.sum())
    means = [float(values[known].mean()) if tokens else None for values in (hit, classifier, learnt)]
    return {"tokens": tokens, **dict(zip(("accepted", "classifier", "learnt"), means, strict=True))}


def auc(score: Tensor, hit: Tensor) -> float:
    """The chance that an accepted token scores above one that is not."""
    low, high = score[~hit].sort().values, score[hit]
    below = torch.searchsorted(low, high) + torch.searchsorted(low, high, right=True)
    return float(below.double().mean()) / (2 * len(low))
