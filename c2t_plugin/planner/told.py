"""What a calibration tells of itself where somebody asks: a server's state, its metrics and its log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.fitting import fitted, prior_of
from c2t_plugin.planner.learnt import NEAREST, Learnt, nll

if TYPE_CHECKING:
    from c2t_plugin.planner.calibration import Calibration

# A slope of `joint` below it would take the least likely tokens first.
LEAST_SLOPE = 0.05


def state_of(calibration: Calibration) -> dict[str, Any]:
    """As JSON. seen: draft tokens. discarded: fits that predicted worse, turns: because the traffic is another. joint:
    see `joint`. nll: nats a token, auc: of the window's verified tokens, [of the classifier's own confidences, of what
    was learnt before each came]. depths: of these tokens by depth, how many, the share that was accepted, and the mean
    that was expected, by classifier and by what was learnt."""
    known, hit, foretold = calibration.window()
    both = [expected[known].clip(1e-6, 1 - 1e-6) for expected in foretold]
    tokens = hit[known]
    mixed = bool(tokens.any()) and not bool(tokens.all())
    depths = [
        _at(known[:, depth], hit[:, depth], *(each[:, depth] for each in foretold)) for depth in range(known.shape[1])
    ]
    learnt, last = calibration.learnt, joint(calibration)
    return {
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
    chance = foretold[0].clip(NEAREST**2, 1 - NEAREST**2)
    logit = np.log(chance / (1 - chance))
    features = np.stack([logit, np.zeros_like(logit)], axis=-1)
    nothing = Learnt.nothing(known.shape[1])
    return fitted(nothing, prior_of(nothing), features, known, hit, calibration.seen)


def _at(known: Array, hit: Array, classifier: Array, learnt: Array) -> dict[str, Any]:
    tokens = int(known.sum())
    means = [float(values[known].mean()) if tokens else None for values in (hit, classifier, learnt)]
    return {"tokens": tokens, **dict(zip(("accepted", "classifier", "learnt"), means, strict=True))}


def auc(score: Array, hit: Array) -> float:
    """The chance that an accepted token scores above one that is not."""
    low, high = np.sort(score[~hit]), score[hit]
    below = np.searchsorted(low, high) + np.searchsorted(low, high, side="right")
    return float(below.mean()) / (2 * len(low))
