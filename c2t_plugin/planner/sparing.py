"""A planner that has drafts scored only where that pays: on a host whose own arithmetic scores them.

On a GPU scores are part of a captured graph. On a CPU they take time of the step. Where they save less than that, a
static chain of the right depth is faster. So a step can do without: it drafts as deep as what came of the steps before
it says, and all of that is verified.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.planner import OwnLimits, Planner
from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.budget import falling_of, sums
from c2t_plugin.planner.following import Outcome
from c2t_plugin.planner.pace import size_of
from c2t_plugin.planner.step_costs import StepCosts
from c2t_plugin.planner.step_planner import StepPlanner

# Scored drafts of a size of batch before any goes without.
FIRST = 48
# Of so many drafts where scores do not pay, how many are scored all the same, one after another, to see if they would.
EVERY, SCORED = 32, 2
# Of what is known of both ways, what is left after a scored draft: some three dozen count.
REMEMBERED = 0.97
# How much better the other way has to look, since both are estimates.
PAYS_FROM = 1.005
# Steps without scores that share a choice of depth, as long as they are of as many requests.
HELD = 4
# Scored drafts whose price is the median, and after how many it is taken anew.
PRICED, PRICED_EVERY = 64, 16


class Worth:
    """What scored drafts of a size of batch came to, beside static ones by depth; which steps are scored for it."""

    def __init__(self, depths: int) -> None:
        """depths: how many, 0 among them."""
        self.drafts = self._turns = 0
        self.pays = True
        # (1 + depths,) of scored drafts, and of static ones by depth
        self._tokens, self._seconds = np.zeros((2, 1 + depths))

    def note(self, tokens: Array, seconds: Array) -> None:
        """Of one scored draft. tokens, seconds: (1 + depths,) expected of its step, and of the same step with a static
        draft of each depth."""
        self.drafts += 1
        self._tokens += tokens - (1.0 - REMEMBERED) * self._tokens
        self._seconds += seconds - (1.0 - REMEMBERED) * self._seconds
        scored, *static = (self._tokens / self._seconds).tolist()
        ahead = scored / max(static)
        self.pays = ahead * PAYS_FROM >= 1.0 if self.pays else ahead >= PAYS_FROM

    def turn(self) -> tuple[bool, bool]:
        """Whether the step at hand and the next one are scored; to be asked once a step."""
        if self.drafts < FIRST or self.pays:
            return True, True
        self._turns += 1
        return self._turns % EVERY < SCORED, (self._turns + 1) % EVERY < SCORED


class Price(NamedTuple):
    """Seconds that a step takes for scores: a_depth, of each depth; a_cut, to choose by them what is verified."""

    a_depth: float = 0.0
    a_cut: float = 0.0

    def of(self, depth: int) -> float:
        """Of a draft so deep."""
        return self.a_depth * depth + self.a_cut


class _ScoredPlanner(Planner):
    """Of steps that are scored, which takes time."""

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        super().__init__(*positional, **keyword)
        # by size of batch: what scores took, and the medians, in few steps
        self._took: dict[int, deque[Price]] = {}
        self._prices: dict[int, Price] = {}
        self._paid = 0

    def paid(self, requests: int, took: Price) -> None:
        """What scores took of a step."""
        size = size_of(requests)
        known = self._took.setdefault(size, deque(maxlen=PRICED))
        known.append(took)
        self._paid += 1
        if size not in self._prices or self._paid % PRICED_EVERY == 0:
            # what follows from costs is remembered by them
            self._prices[size] = Price(*(float(f"{median(each):.1e}") for each in zip(*known, strict=True)))

    def price(self, requests: int) -> Price:
        """Of a step of so many requests."""
        return self._prices.get(size_of(requests), Price())

    def costs(self, requests: int) -> StepCosts:
        known, (a_depth, a_cut) = super().costs(requests), self.price(requests)
        # nothing is chosen of a step that drafts nothing
        always, plain = known.always + a_cut, known.plain - a_cut
        return known._replace(always=always, plain=plain, a_depth=known.a_depth + a_depth)


class _StaticPlanner(Planner):
    """Of steps without scores. It knows of acceptance what the planner of the others does, and hears of none."""

    def __init__(self, scored: Planner, **how: Any) -> None:
        super().__init__(scored.curve, scored.d_max, packed=False, **how)
        self._means, self._drafts, self.accepted = scored._means, scored._drafts, scored.accepted

    def seconds(self, requests: int) -> Array:
        """(depths,) of a step of each depth."""
        none = np.zeros((len(self.depths), 1), dtype=np.int64)
        return self._seconds(requests, none, 0)[:, 0]


class SparingPlanner(StepPlanner):
    """A StepPlanner of chains that also says of each step whether it is scored.

    Asked as a StepPlanner is. `keep` and `learn` are handed NaN of steps that were not.
    """

    _kind = _ScoredPlanner

    def __init__(
        self,
        *positional: Any,
        scored_s: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
        **keyword: Any,
    ) -> None:
        """scored_s: seconds that scores have taken since the start. For the rest see StepPlanner."""
        self._static: _StaticPlanner | None = None
        # that it has taken to choose by scores
        self._cut_s = 0.0
        # Standing still while drafts are scored and cut, it measures what steps take without that.
        super().__init__(*positional, clock=lambda: clock() - scored_s() - self._cut_s, **keyword)
        self._wall = clock
        # of the step at hand, and of the next one as far as is known
        self.scores = self.scores_next = True
        self._scored_s = scored_s
        self._before = Price(scored_s())
        # by size of batch
        self._worth = defaultdict[int, Worth](lambda: Worth(self._steps + 1))
        # depth that holds, for so many requests, and for how many more steps
        self._held = 0, 0, 0
        self._requests = self._drafts = self._without = 0
        # of steps without scores that are not learnt from yet, depth and accepted tokens of each request
        self._came: list[tuple[int, Tensor]] = []

    def interrupt(self) -> None:
        super().interrupt()
        # a prefill's, whose requests may be any
        self.scores_next = True

    def begin(self, requests: int, whole: bool = False, own: Sequence[OwnLimits | None] = ()) -> int:
        self._pay()
        self._requests, self.scores, self.scores_next = requests, True, True
        depth = super().begin(requests, whole, own)
        self._drafts += depth > 0
        self._without += depth > 0 and not self.scores
        return depth

    def _pay(self) -> None:
        """For the scores of the step that has ended. A file's curve holds for all that a step takes."""
        before, self._before = self._before, Price(self._scored_s(), self._cut_s)
        planner, scored = self._planner, self.measures and self.scores and self.depth
        if scored and self._requests and isinstance(planner, _ScoredPlanner):
            scores, cut = (now - then for now, then in zip(self._before, before, strict=True))
            planner.paid(self._requests, Price(scores / self.depth, cut))

    def _plan(self, planner: Planner, requests: int) -> None:
        static = self._static
        if static is None:
            static = self._static = _StaticPlanner(planner, pace=self.pace)
        # of all depths, which it chooses from
        static.allowed = 1 + self.depths[self.allowed - 1]
        static.curve, static.skips = planner.curve, self.skips
        self.scores, self.scores_next = self._turn(requests)
        if self.scores:
            self._hear_spared()
            super()._plan(planner, requests)
        else:
            self.depth, self._promised_s = self._static_depth(static, requests), None
        # whichever decides the next step
        planner.behind = static.behind = self.skips and self.depth == 0

    def _turn(self, requests: int) -> tuple[bool, bool]:
        """See Worth.turn. Who has limits of their own is cut by scores."""
        if not self.measures or self._unread is not None or any(self._own):
            return True, True
        return self._worth[size_of(requests)].turn()

    def _static_depth(self, static: _StaticPlanner, requests: int) -> int:
        depth, of, left = self._held
        if left and of == requests:
            self._held = depth, of, left - 1
            return depth
        self._hear_spared()
        depth = static.depth(requests)
        self._held = depth, requests, 0 if static.probing else HELD - 1
        return depth

    def keep(self, kept: Tensor, own: Tensor, sure: Tensor) -> Tensor:
        if not self.scores:
            return kept
        began = self._wall()
        found = super().keep(kept, own, sure)
        self._cut_s += self._wall() - began
        return found

    def _spent(self, acceptance: Tensor, longest: Tensor, at_least: Tensor) -> Tensor:
        kept = super()._spent(acceptance, longest, at_least)
        planner, static = self._planner, self._static
        assert isinstance(planner, _ScoredPlanner)
        if static is None:
            # of a draft that nobody planned
            return kept
        if self._promised_s is not None:
            if not any(self._own):
                chain = falling_of(acceptance.double().numpy())
                came = len(chain) + chain[np.arange(chain.shape[1]) < kept.numpy()[:, None]].sum()
                self._judge(planner, static, chain, came, self._promised_s)
            self._promised_s -= planner.price(len(kept)).of(acceptance.shape[1])
        return kept

    def _judge(self, planner: Planner, static: _StaticPlanner, chain: Array, tokens: float, seconds: float) -> None:
        """chain: (requests, drafted) how likely each token is accepted with all before it. tokens, seconds: that the
        step is expected to bring and to take."""
        requests, drafted = chain.shape
        further = chain[:, -1:] * planner.accepted[drafted:].cumprod()
        whole = requests + sums(np.hstack([chain, further]).sum(axis=0))
        self._worth[size_of(requests)].note(np.append(tokens, whole), np.append(seconds, static.seconds(requests)))

    def learn(self, *outcomes: Outcome) -> None:
        (sure, verified, accepted, _), *since = outcomes
        spared = bool(sure[:1, -1:].isnan().all())
        # those of earlier drafts have scores
        if scored := since if spared else outcomes:
            super().learn(*scored)
        if spared:
            # of a text that has ended fewer were verified
            self._came.append((sure.shape[1], accepted[verified == sure.shape[1]]))

    def _hear_spared(self) -> None:
        """Learn from the steps without scores since this was asked before: one alone costs as much as all of them."""
        for depth in sorted({deep for deep, _ in self._came}):
            hits = torch.cat([accepted for deep, accepted in self._came if deep == depth])
            came = (torch.arange(depth) < hits[:, None]).double().numpy()
            if self._planner is not None and came.size:
                self._planner.hear(came)
        self._came.clear()

    def state(self) -> dict[str, Any]:
        """As StepPlanner's. unscored: the share of drafts that went without scores."""
        return {**super().state(), "unscored": self._without / self._drafts if self._drafts else None}
