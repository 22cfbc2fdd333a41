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
from c2t_plugin.planner.planner import WHOLE_FIRST, Planner, draft_passes
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

    Called in this order: `begin` for each draft, and `goes_on` after each of its tokens, in whichever process drafts.
    """

    def __init__(self) -> None:
        self._prices: Prices | None = None
        self._chances = Chances(0)

    def prices(self, planner: Planner, requests: int, learnt: Learnt | None) -> Prices:
        """See Prices.of."""
        return Prices.of(planner, requests, learnt)

    def begin(self, prices: Prices | None) -> None:
        """None: this draft is as deep as it may be."""
        self._prices = prices
        if prices is not None:
            self._chances = Chances(prices.requests, prices.meaning)

    def goes_on(self, confidence: Iterable[float], log_prob: Iterable[float]) -> bool:
        """Whether to draft one more token. Of each request's newest token: see Chances.add."""
        if self._prices is None:
            return True
        self._chances.add(confidence, log_prob)
        return self.pays(self._prices, self._chances.rows)

    def pays(self, prices: Prices, chances: Sequence[Sequence[float]]) -> bool:
        """Whether one more token does. chances: of each request, of its tokens, falling."""
        drafted, most = len(chances[0]), len(prices.ratios)
        if prices.whole or drafted >= most:
            return drafted < most
        return _pays(prices, chances)


class Chances:
    """What a planner takes the confidences of a draft for, token by token: `rows`, as `DraftEnd.pays` takes them.

    The arithmetic of Calibration and `falling` in plain Python, where a dozen numbers would cost torch a dozen launches
    per token.
    """

    def __init__(self, requests: int, meaning: Meaning | None = None) -> None:
        self.rows: list[list[float]] = [[] for _ in range(requests)]
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


def _pays(prices: Prices, chances: Sequence[Sequence[float]]) -> bool:
    drafted, most = len(chances[0]), len(prices.ratios)
    verify: list[float] = pass_seconds(prices.curve, prices.requests, prices.requests * most, (), prices.costs).tolist()
    gains = sorted((chance for row in chances for chance in row), reverse=True)
    least = _rate(prices, gains, drafted, verify)
    last = [row[-1] for row in chances]
    for depth, ratio in enumerate(prices.ratios[drafted:], start=drafted + 1):
        last = [chance * ratio for chance in last]
        gains = sorted(gains + last, reverse=True)
        if _rate(prices, gains, depth, verify) > least:
            return True
    return False


def _rate(prices: Prices, gains: Sequence[float], depth: int, verify: Sequence[float]) -> float:
    """The most output tokens per second of a step, whose likeliest draft tokens are verified. verify: seconds of the
    target's pass by their number, rising."""
    # whatever was measured beside the passes, a step takes some time
    other = max(prices.drafting(depth), LEAST_SECONDS - verify[0])
    whole = (prices.requests + sum(gains)) / (verify[len(gains)] + other)
    if not prices.packed:
        return whole
    other += prices.costs.a_cut
    expected = accumulate(gains[:-1], initial=float(prices.requests))
    return max(whole, *(tokens / (took + other) for tokens, took in zip(expected, verify, strict=False)))
