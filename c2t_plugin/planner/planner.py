"""How deep to draft and how many draft tokens to verify, so that output tokens per second are most.

A fixed beta answers neither question: what a candidate costs depends on the machine and on how many requests share a
step. With acceptance probabilities and a cost curve both have an answer, and plain decoding is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.errors import ConfigError
from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.budget import best_rows, falling_of, pass_seconds, spend, sums
from c2t_plugin.planner.curve import LEAST_SECONDS, CostCurve
from c2t_plugin.planner.gains import RecentGains
from c2t_plugin.planner.pace import Pace
from c2t_plugin.planner.step_costs import StepCosts

if TYPE_CHECKING:
    from c2t_plugin.request_options import RequestOptions

# Steps between two probes at least, and the share of the time that all of them together may cost, as far as is known.
PROBE_EVERY, PROBES_COST = 16, 0.01
# How much faster than plain decoding drafting has to look: of several estimates the best one is mostly too high.
PAYS_FROM = 1.02
# Weight of the newest step in the running means of acceptance by depth, and of each of its drafts at most: what ten
# drafts of one request say is mostly chance, and who stops drafting for it does not see it mended.
FORGET, FORGET_ONE = 0.1, 0.02
# Drafts accepted up to a depth that the depth above it counts as there. Who has seen few takes a token to be as likely
# after the one before it as that one was: else a few hard ones, and drafts would never be deep again.
PRIOR = 16
# Drafts before plain decoding may be chosen, which teaches nothing: who does so for a few bad ones goes on to.
TAUGHT = 128
# Steps that share the price of the pass with which a draft reads what plain steps have left it behind with. Paid by the
# first one alone, it would keep a gain away that is smaller in each step.
HOLDS = 16
# Drafts that go as deep as they may before one ends on its way: what nobody has seen looks like nothing.
WHOLE_FIRST = 4


def draft_passes(depth: int) -> int:
    """Of a step that drafts so deep, besides draft extend, which predicts the first token."""
    return max(0, depth - 1)


def switched_depths(d_max: int) -> tuple[int, ...]:
    """0 to d_max, rising: each has CUDA graphs of its own in an engine, so few of those between."""
    return tuple(sorted({0, d_max, *(2**i for i in range(d_max.bit_length()) if 2**i < d_max)}))


class OwnLimits(NamedTuple):
    """What one request sets for itself.

    threshold: none of its draft tokens is verified from the first less likely one on; None cuts nothing. longest: draft
    tokens of it at most, None: any number. exact: whether all that this leaves is verified, whatever that brings.
    """

    threshold: float | None
    longest: int | None
    exact: bool

    @classmethod
    def of(cls, asked: RequestOptions, *, lower: bool) -> OwnLimits | None:
        """None where nothing is set. lower: a planner may verify less than is asked for."""
        if asked.threshold is None and asked.longest is None:
            return None
        return cls(asked.threshold, asked.longest, not lower and asked.threshold is not None)

    def leaves(self, depth: int, chance: float) -> bool:
        """Whether they leave a token of this depth, from 1 on, if they left those before it. chance: of all of them."""
        return (self.longest is None or depth <= self.longest) and not chance < (self.threshold or 0.0)


class Planner:
    """Chooses each step's draft depth before it drafts, and each request's kept tokens after.

    The depth comes from how often a token is accepted if the one before it is, by depth: running means of the one over
    those of the other; `forget` is the newest step's weight in them, less where it has few drafts. A depth that few
    drafts have reached goes on as the one above it, more or less. The first step drafts as deep as it may, since a
    guess that is too low would be corrected by probes only.

    Some steps are probes, at least `probe_every` apart: of a depth that does not seem best, plain decoding among them,
    and all that is drafted is verified. So no depth whose price or acceptance has changed is lost from sight. Each is
    probed as often as its equal part of `PROBES_COST` pays for what that is expected to lose.
    """

    def __init__(
        self,
        curve: CostCurve,
        d_max: int,
        probe_every: int = PROBE_EVERY,
        forget: float = FORGET,
        *,
        prior: float = PRIOR,
        taught: int = TAUGHT,
        depths: Sequence[int] | None = None,
        packed: bool = True,
        pace: Pace | None = None,
    ) -> None:
        """prior, taught: see PRIOR and TAUGHT. depths: those that can be drafted, rising, from 0 to d_max; None: all.
        packed: whether a draft token that is not verified is not computed; without that all drafted ones are verified.
        pace: what steps cost beside their passes, where that is measured; else the curve says it."""
        self.depths = tuple(range(d_max + 1) if depths is None else depths)
        if d_max < 1:
            raise ConfigError(f"the planner needs at least 1 draft step, got {d_max}")
        if list(self.depths) != sorted({0, d_max, *(depth for depth in self.depths if 0 < depth < d_max)}):
            raise ConfigError(f"depths must rise from 0 to {d_max}, got {self.depths}")
        if probe_every < 1 or not 0.0 < forget <= 1.0:
            raise ConfigError(f"probe_every must be at least 1 and forget in (0, 1], got {probe_every} and {forget}")
        self.curve = curve
        self.d_max = d_max
        # of the depths, how many of the lowest may be chosen
        self.allowed = len(self.depths)
        self.probe_every = probe_every
        self.forget, self._prior, self._taught = forget, prior, taught
        self.packed = packed
        # whether plain steps do without draft extend, and the newest step was one
        self.skips = self.behind = False
        self._pace = pace
        # (depths, 1) each: draft tokens of a request, and draft passes
        self._drafted = np.array([(depth, draft_passes(depth)) for depth in self.depths]).T[..., None]
        # running means of the token at depth i + 1, and of the one before it where that was drafted
        self._means = np.zeros((2, d_max))
        # (d_max,) draft tokens that they come from
        self._drafts = np.zeros(d_max)
        # (d_max,) of the token at depth i + 1, given the one before it
        self.accepted = np.zeros(d_max)
        # (depths,) what each has saved for its next probe, in steps; those of it that are left; where it is
        self._saved = np.zeros(len(self.depths))
        self._since_probe = self._left = self._place = 0
        self._steps_of_probe = 1 if pace is None else 1 + pace.settled
        # whether the step at hand is a probe
        self.probing = False
        self._recent = RecentGains()
        # by requests: see `_seconds`
        self._known_seconds: dict[int, tuple[tuple[object, ...], Array]] = {}
        # whole drafts that it has learnt from
        self.whole_drafts = 0
        # expected seconds of the step at hand, once `depth` or `keep` has settled what it does
        self.promised_s: float | None = None

    def depth(self, requests: int, own: Sequence[OwnLimits | None] = (), steps: int = 1) -> int:
        """How deep to draft in the next step of so many requests; 0 is plain decoding. own: of each what it has set for
        itself, which is planned around; nothing of those that are left out. steps: since this was asked before."""
        self.probing = False
        chosen = self.depths[self._probed(*self._priced(requests, own), steps) if self._drafts[0] else self.allowed - 1]
        self.behind = self.skips and chosen == 0
        if chosen:
            self.promised_s = None
        return chosen

    def _probed(self, best: int, lost: Array, steps: int) -> int:
        """The place of the depth to draft. lost: (depths,) steps that each would lose for one of a probe."""
        self._saved += steps * PROBES_COST / max(1, len(lost) - 1)
        self._since_probe += steps
        after = self._saved - self._steps_of_probe * lost
        after[best] = after[self.allowed :] = -1.0
        place = int(after.argmax())
        if not self._left and after[place] >= 0.0 and self._since_probe >= self.probe_every:
            self._place, self._left = place, self._steps_of_probe
            self._saved[place], self._since_probe = 0.0, 0
        self.probing = self._left > 0
        self._left -= self.probing
        return self._place if self.probing else best

    def _priced(self, requests: int, own: Sequence[OwnLimits | None]) -> tuple[int, Array]:
        """The place of the best depth, and (depths,) how many of its steps another one loses that is verified whole."""
        expected, seconds, most = self._outcomes(requests, own)
        counts = np.arange(expected.shape[1])
        possible = counts <= most[:, None] if self.packed else counts == most[:, None]
        rates = np.where(possible, expected / seconds, -1.0)
        rates[self.allowed :] = -1.0
        # of plain decoding, of which nothing more is decided
        self.promised_s = float(seconds[0, 0])
        plain = float(rates[0, 0])
        if self._drafts[0] < self._taught and expected.max() > expected[0, 0]:
            plain = rates[0, 0] = -1.0
        best, count = divmod(int(rates.argmax()), len(counts))
        if rates[best, count] < PAYS_FROM * plain:
            best = count = 0
        each = np.arange(len(most))
        lost = seconds[each, most] - expected[each, most] / rates[best, count]
        return best, lost / seconds[best, count]

    def _outcomes(self, requests: int, own: Sequence[OwnLimits | None]) -> tuple[Array, Array, Array]:
        """(depths, counts) output tokens and seconds of a step that verifies so many draft tokens beside those of
        `own`, and (depths,) how many it can."""
        chain = self.accepted.cumprod()
        taken, free = _by_depth(chain, requests, own)
        gains = chain.repeat(free)
        drafted, _ = self._drafted
        expected = requests + sums(taken * chain)[drafted] + sums(gains)
        seconds = self._seconds(requests, sums(taken)[drafted], len(gains))
        return expected, np.broadcast_to(seconds, expected.shape), sums(free)[drafted][:, 0]

    def _seconds(self, requests: int, taken: Array, most: int) -> Array:
        """(depths, counts or 1) of a step that verifies 0 to `most` draft tokens beside (depths, 1) `taken` ones."""
        costs = self.costs(requests)
        asked = (self.curve, costs, self.packed, self.behind, most, taken.tobytes())
        # most steps ask what the one before of as many requests has asked
        known = self._known_seconds.get(requests)
        if known is not None and known[0] == asked:
            return known[1]
        drafted, passes = self._drafted
        window = drafted * requests
        rows = np.minimum(taken + np.arange(most + 1), window) if self.packed else window
        whole = pass_seconds(self.curve, requests, requests * self.d_max, (), costs)
        seconds = whole[rows] + costs.scale * passes * self.curve.draft_s(requests) + costs.a_cut * (rows < window)
        catching_up = self.curve.draft_extend / HOLDS if self.behind else 0.0
        beside = np.array([costs.beside(depth) + catching_up * (depth > 0) for depth in self.depths])[:, None]
        found: Array = np.maximum(seconds + beside, LEAST_SECONDS)
        self._known_seconds[requests] = asked, found
        return found

    def keep(
        self,
        acceptance: Tensor,
        longest: Tensor | None = None,
        at_least: Tensor | None = None,
        sizes: Sequence[int] = (),
    ) -> Tensor:
        """(requests,) int64 draft tokens to verify; see `spend`. acceptance: (requests, drafted) of this step."""
        drafted, self.promised_s = acceptance.shape[1], None
        if acceptance.numel():
            chain = falling_of(acceptance.double().numpy())
            self.hear(chain)
        if not self.packed or self.probing:
            whole = torch.full((len(acceptance),), drafted)
            return whole if longest is None else longest.clamp(max=drafted)
        costs = self.costs(len(acceptance))
        found = spend(acceptance, self.curve, draft_passes(drafted), longest, at_least, sizes, costs)
        self.promised_s = found.seconds
        return found.kept

    def observe(self, acceptance: Tensor) -> None:
        """Learn from the (requests, drafted) acceptance of a step that `rows` was asked for in the place of `keep`."""
        if acceptance.numel():
            chain = falling_of(acceptance.double().numpy())
            self._recent.note(chain)
            self.hear(chain)

    def rows(self, requests: int, depth: int, sizes: Sequence[int] = ()) -> int:
        """Tokens of the target's pass, roots included, of a step whose acceptance is not known yet.

        As many as make expected output tokens per second most, where the best draft tokens fill what `sizes` (see
        `spend`) leave; the fewest, if several do. All of them as long as no step of this depth is known.
        """
        gains = self._recent.expected(requests, depth) if self.packed and not self.probing else None
        if gains is None:
            return requests * (depth + 1)
        passes = draft_passes(depth) * self.curve.draft_s(requests)
        found, self.promised_s = best_rows(gains, requests, self.curve, passes, sizes, self.costs(requests), depth)
        return found

    def costs(self, requests: int) -> StepCosts:
        """What steps of so many requests cost beside the curve's passes: what they turned out to, else as it says."""
        measured = None if self._pace is None else self._pace.costs(self.curve, requests, self.skips)
        return measured or StepCosts.before(self.curve, self.skips)

    def hear(self, chain: Array) -> None:
        """Learn from a step. chain: (requests, drafted) how likely each token is accepted with all before it."""
        (requests, drafted), mean = chain.shape, chain.mean(axis=0)
        found = np.ones((2, drafted))
        found[0], found[1, 1:] = mean, mean[:-1]
        means = self._means[:, :drafted]
        # the mean of all drafts as long as they are few
        self._drafts[:drafted] += requests
        weight = np.maximum(min(self.forget, requests * FORGET_ONE), requests / self._drafts[:drafted])
        means += weight * (found - means)
        self.whole_drafts += int(drafted == self.d_max)
        prior, likely = 0.0, 0.0
        # of a depth that was never seen both sums are 0: as likely as the one above it
        for depth, (token, above) in enumerate((self._means * self._drafts).T.tolist()):
            known = above + prior
            likely = (token + prior * likely) / known if known else likely
            self.accepted[depth], prior = likely, self._prior


def _by_depth(chain: Array, requests: int, limits: Sequence[OwnLimits | None]) -> tuple[Array, Array]:
    """(d_max,) int64 each: requests whose token of a depth is verified in any case, and those where that is open.

    chain: (d_max,) mean acceptance by depth; a threshold is taken to cut where this falls below it.
    """
    depths, d_max = np.arange(len(chain)), len(chain)
    own = [each for each in limits if each is not None]
    if not own:
        return np.zeros_like(depths), np.full_like(depths, requests)
    thresholds = np.array([each.threshold or 0.0 for each in own])
    longest = np.array([d_max if each.longest is None else each.longest for each in own])
    exact = np.array([each.exact for each in own])
    left = (depths < longest[:, None]) & (chain >= thresholds[:, None])
    return left[exact].sum(0), left[~exact].sum(0) + requests - len(own)
