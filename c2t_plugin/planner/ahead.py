"""Where a draft ends, decided while it is under way: where that costs no wait, as on a CPU.

It may be decided in another process than the planner's: that one is sent `Prices` with every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from c2t_plugin.planner.budget import pass_seconds
from c2t_plugin.planner.curve import LEAST_SECONDS, CostCurve
from c2t_plugin.planner.learnt import FURTHEST, NEAREST, Learnt
from c2t_plugin.planner.planner import WHOLE_FIRST, OwnLimits, Planner, draft_passes
from c2t_plugin.planner.step_costs import StepCosts

# Of Prices, as processes send them to each other.
VERSION = 2


class Meaning(NamedTuple):
    """What confidences are taken for, of a planner that learns; see Learnt. offsets: (d_max,)."""

    slope: float
    own: float
    offsets: tuple[float, ...]


class Prices(NamedTuple):
    """What the drafts of a step of so many requests end by. Numbers alone, so that it is soon pickled.

    whole: too few drafts are known for one to end. packed: see Planner. ratios: (d_max,) how likely a token of each
    depth is accepted if the one before it is. costs: see Planner.costs. meaning: None: confidences are what they say.
    """

    requests: int
    curve: CostCurve
    packed: bool
    whole: bool
    ratios: tuple[float, ...]
    costs: StepCosts
    meaning: Meaning | None = None
    version: int = VERSION

    @classmethod
    def of(cls, planner: Planner, requests: int, learnt: Learnt | None = None) -> Prices:
        """As they are now. learnt: what confidences are to be taken for."""
        meaning = None if learnt is None else Meaning(learnt.slope, learnt.own, tuple(learnt.offsets.tolist()))
        whole, ratios = planner.whole_drafts < WHOLE_FIRST, tuple(planner.accepted.tolist())
        return cls(requests, planner.curve, planner.packed, whole, ratios, planner.costs(requests), meaning)

    def drafting(self, depth: int) -> float:
        """Seconds of a step that drafts so deep beside the target's pass."""
        passes = self.costs.scale * draft_passes(depth) * self.curve.draft_s(self.requests)
        return passes + self.costs.beside(depth)


class DraftEnd:
    """Has each draft go on as long as that is expected to bring more output tokens per second than ending it.

    A token that is not drafted yet is as likely as the planner's means make it after the one before it. All depths that
    may follow are looked at: the next pass alone may not pay where two do.

    Of a request with limits of its own no token counts that these leave out, and what they ask for counts as verified
    in any case.

    Called in this order: `begin` for each draft, and `goes_on` after each of its tokens, in whichever process drafts.
    """

    def __init__(self) -> None:
        self._prices: Prices | None = None
        self._chances = Chances(0)

    def prices(self, planner: Planner, requests: int, learnt: Learnt | None) -> Prices:
        """See Prices.of."""
        return Prices.of(planner, requests, learnt)

    def begin(self, prices: Prices | None, own: Sequence[OwnLimits | None] = ()) -> None:
        """prices: None: this draft is as deep as it may be. own: of each request its own limits; () if none has."""
        self._prices = prices
        if prices is not None:
            self._chances = Chances(prices.requests, prices.meaning, own)

    def goes_on(self, confidence: Iterable[float], log_prob: Iterable[float]) -> bool:
        """Whether to draft one more token. Of each request's newest token: see Chances.add."""
        if self._prices is None:
            return True
        self._chances.add(confidence, log_prob)
        return self.pays(self._prices, self._chances)

    def pays(self, prices: Prices, chances: Chances) -> bool:
        """Whether one more token does."""
        drafted, most = len(chances.rows[0]), len(prices.ratios)
        if prices.whole or drafted >= most:
            return drafted < most
        return _pays(prices, chances)


class Chances:
    """What a planner takes the confidences of a draft for, token by token.

    rows: of each request, of its tokens, falling. own: of each request what it has set for itself. left: how many of
    its tokens so far that leaves.

    The arithmetic of Calibration and `falling` in plain Python, where a dozen numbers would cost torch a dozen launches
    per token.
    """

    def __init__(self, requests: int, meaning: Meaning | None = None, own: Sequence[OwnLimits | None] = ()) -> None:
        self.rows: list[list[float]] = [[] for _ in range(requests)]
        self.own, self.left = own or [None] * requests, [0] * requests
        self._meaning = meaning
        # of each request's tokens so far, the lowest confidence, and the chance of all of them by what was learnt
        self._lowest, self._product = [1.0] * requests, [1.0] * requests

    def add(self, confidence: Iterable[float], log_prob: Iterable[float]) -> None:
        """One more token of each request: its confidence, NaN where that is not known, and the logarithm of the draft's
        own probability of it."""
        for request, (sure, own) in enumerate(zip(confidence, log_prob, strict=True)):
            row, above = self.rows[request], self._lowest[request]
            known = not math.isnan(sure)
            lowest = self._lowest[request] = min(above, max(sure, 0.0)) if known else above
            found = lowest
            if self._meaning is not None:
                self._product[request] *= _meant(self._meaning, len(row), lowest / above if above > 0 else 0.0, own)
                found = self._product[request] if known else 1.0
            limits, drafted = self.own[request], len(row)
            # as it is cut: by the confidence, whatever that was found to mean
            if self.left[request] == drafted and (limits is None or limits.leaves(drafted + 1, lowest)):
                self.left[request] += 1
            row.append(min(found, row[-1]) if row else found)


def _meant(meaning: Meaning, depth: int, given: float, log_prob: float) -> float:
    """The chance of a token at depth + 1 whose chain was accepted up to it; see learnt.features_of."""
    own = 0.0
    if not math.isnan(log_prob):
        likely = min(log_prob, -1e-9)
        own = min(max(likely - math.log(-math.expm1(likely)), -FURTHEST), FURTHEST)
    logit = meaning.slope * _logit(given) + meaning.own * own + meaning.offsets[depth]
    return 0.5 * (1.0 + math.tanh(0.5 * logit))


def _logit(chance: float) -> float:
    chance = min(max(chance, NEAREST), 1.0 - NEAREST)
    return math.log(chance / (1.0 - chance))


def _pays(prices: Prices, chances: Chances) -> bool:
    drafted, most = len(chances.rows[0]), len(prices.ratios)
    verify: list[float] = pass_seconds(prices.curve, prices.requests, prices.requests * most, (), prices.costs).tolist()
    each = list(zip(chances.rows, chances.left, chances.own, strict=True))
    asked = [chance for row, left, own in each if _exact(own) for chance in row[:left]]
    gains = sorted((chance for row, left, own in each if not _exact(own) for chance in row[:left]), reverse=True)
    least = _rate(prices, asked, gains, drafted, verify)
    last = [(row[-1], own) for row, left, own in each if left == drafted]
    for depth, ratio in enumerate(prices.ratios[drafted:], start=drafted + 1):
        grown = ((chance * ratio, own) for chance, own in last)
        last = [(chance, own) for chance, own in grown if own is None or own.leaves(depth, chance)]
        asked = asked + [chance for chance, own in last if _exact(own)]
        gains = sorted(gains + [chance for chance, own in last if not _exact(own)], reverse=True)
        if _rate(prices, asked, gains, depth, verify) > least:
            return True
    return False


def _exact(own: OwnLimits | None) -> bool:
    return own is not None and own.exact


def _rate(prices: Prices, asked: Sequence[float], gains: Sequence[float], depth: int, verify: Sequence[float]) -> float:
    """The most output tokens per second of a step, whose likeliest draft tokens are verified.

    asked: chances of those that are verified in any case. gains: of the others, falling. verify: seconds of the
    target's pass by their number.
    """
    # whatever was measured beside the passes, a step takes some time
    other = max(prices.drafting(depth), LEAST_SECONDS - verify[0])
    certain, window = prices.requests + sum(asked), prices.requests * depth
    if not prices.packed:
        return (certain + sum(gains)) / (verify[window] + other)
    expected = accumulate(gains, initial=certain)
    cut = other + prices.costs.a_cut
    return max(
        tokens / (verify[count] + (cut if count < window else other))
        for count, tokens in enumerate(expected, start=len(asked))
    )
