"""What a planner decides, written out in plain Python: by confidences of the step itself, and by those of steps before.

A simulation's sums round otherwise than the server's, so each rule keeps how near its nearest decision was to another.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from c2t_plugin.planner import CostCurve

D_MAX = 4
DEPTHS = (0, 1, 2, 4)
PROBE_EVERY, PROBES_COST = 16, 0.01
FORGET, FORGET_ONE, WHOLE_FIRST, HOLDS, PRIOR, TAUGHT = 0.1, 0.02, 4, 16, 16, 128
MEMORY, HELD = 8, 8
# Cheap for one request, dear for eight, for which plain decoding is faster.
CURVE = CostCurve(verify=((1, 1.0), (4, 1.2), (64, 16.0)), draft=((1, 0.05), (64, 0.1)), fixed=0.1, draft_extend=0.1)


@dataclass(frozen=True)
class Limits:
    """What one request asks for: docs/requests.md. beta: a threshold of its own, 0 where its drafts are to be whole;
    None: it has none. most: draft tokens of it that are verified at most; None: any number."""

    beta: float | None = None
    most: int | None = None

    @property
    def asks(self) -> bool:
        """Whether a planner drops nothing that these leave."""
        return self.beta is not None


FREE = Limits()


@dataclass
class Plan:
    """What the server should decide, step by step. packed: whether tokens behind a cut cost nothing. ends: whether a
    draft can end on its way. skips: whether the draft reads plain steps in one pass, when it is asked again. margin:
    how near the nearest decision was to another one. tokens, above: running means of a depth's acceptance, and of the
    one before it where that depth was drafted. counts: draft tokens that they come from. probing: whether the step is a
    probe, of which all is verified. saved: what each depth has for its next one. since: steps since the last one."""

    packed: bool
    curve: CostCurve = CURVE
    ends: bool = False
    skips: bool = False
    tokens: list[float] = field(default_factory=list)
    above: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    saved: list[float] = field(default_factory=lambda: [0.0] * len(DEPTHS))
    since: int = 0
    # steps since a depth was decided on
    stride: int = 1
    probing: bool = False
    whole: int = 0
    margin: float = math.inf
    depths: list[int] = field(default_factory=list)

    def depth(self, requests: int, own: Sequence[Limits] = ()) -> int:
        """How deep a step begins to draft. own: limits of each request; (): they have none."""
        found = self._depth(requests, own)
        self.depths.append(D_MAX if found and self.ends and not self.probing else found)
        return self.depths[-1]

    def drafted(self, chances: Sequence[Sequence[float]], own: Sequence[Limits] = ()) -> int:
        """How deep it drafts, by the confidences of its tokens, of which those that it should not have do not count.
        More than there are, if there should be more."""
        depth, there, most = 1, len(chances[0]), self.depths[-1] if self.probing else D_MAX
        while depth <= there and depth < most and self._goes_on([list(row[:depth]) for row in chances], own):
            depth += 1
        self.depths[-1] = depth
        return depth

    def _goes_on(self, chances: list[list[float]], own: Sequence[Limits]) -> bool:
        depth = len(chances[0])
        if own and not any(self._grows(row, limits) for row, limits in zip(chances, own, strict=True)):
            return False
        if self.whole < WHOLE_FIRST or self.probing:
            return True
        falling = [[min(row[: n + 1]) for n in range(depth)] for row in chances]
        found = [self._most(falling, depth, own)]
        for deeper in range(depth, D_MAX):
            falling = [[*row, row[-1] * self.ratios[deeper]] for row in falling]
            found.append(self._most(falling, deeper + 1, own))
        best = max(found[1:])
        self.margin = min(self.margin, abs(best / found[0] - 1))
        return best > found[0]

    def _most(self, falling: list[list[float]], depth: int, own: Sequence[Limits]) -> float:
        """The most output per second that a step of these brings."""
        return max(tokens / took for tokens, took in self._outcomes(falling, depth, own))

    def _outcomes(self, falling: list[list[float]], depth: int, own: Sequence[Limits]) -> list[tuple[float, float]]:
        """Output tokens and seconds of a step that verifies what is asked for, and 0, 1, 2, ... of the others."""
        asked: list[float] = []
        gains: list[float] = []
        requests = len(falling)
        for row, limits in zip(falling, own or [FREE] * requests, strict=True):
            (asked if limits.asks else gains).extend(row[: self._left(row, limits)])
        gains.sort(reverse=True)
        counts = range(len(gains) + 1) if self.packed else [len(gains)]
        rows = [len(asked) + n if self.packed else depth * requests for n in counts]
        return [
            (requests + sum(asked) + sum(gains[:n]), self.seconds(requests, count, depth))
            for n, count in zip(counts, rows, strict=True)
        ]

    def _left(self, falling: Sequence[float], limits: Limits) -> int:
        """How many tokens of a draft a request's own limits leave."""
        row = falling[: limits.most]
        if not limits.beta:
            return len(row)
        self.margin = min([self.margin, *(abs(p - limits.beta) for p in row)])
        return next((n for n, p in enumerate(row) if p < limits.beta), len(row))

    def _grows(self, chances: Sequence[float], limits: Limits) -> bool:
        """Whether one more token of a draft may be verified."""
        return self._left(chances, limits) == len(chances) and (limits.most is None or len(chances) < limits.most)

    @property
    def behind(self) -> bool:
        """Whether the draft has not read the newest step."""
        return self.skips and bool(self.depths) and not self.depths[-1]

    @property
    def ratios(self) -> list[float]:
        """How likely each depth's token is accepted if the one before it is; as that one, until more drafts have come
        so far."""
        known: list[float] = []
        for token, above, count in zip(self.tokens, self.above, self.counts, strict=True):
            hoped = [PRIOR * known[-1], PRIOR] if known else [0.0, 0.0]
            known.append((token * count + hoped[0]) / (above * count + hoped[1]))
        return known + known[-1:] * (D_MAX - len(known))

    def _depth(self, requests: int, own: Sequence[Limits]) -> int:
        self.probing = False
        if not self.tokens:
            return D_MAX
        ratios = self.ratios
        chain = [math.prod(ratios[: depth + 1]) for depth in range(D_MAX)]
        best_of, whole = [], []
        for depth in DEPTHS:
            catching_up = self.curve.draft_extend / HOLDS if depth and self.behind else 0.0
            found = self._outcomes([chain[:depth]] * requests, depth, own)
            outcomes = [(tokens, took + catching_up) for tokens, took in found]
            best_of.append(max(outcomes, key=lambda outcome: outcome[0] / outcome[1]))
            whole.append(outcomes[-1])
        # plain decoding teaches nothing, nor does a draft of which nothing may be verified
        untaught = int(self.counts[0] < TAUGHT and max(tokens for tokens, _ in whole) > requests)
        best = untaught + self.best([tokens / took for tokens, took in best_of[untaught:]], ties=True)
        return DEPTHS[self._probed(best, *best_of[best], whole)]

    def _probed(self, best: int, tokens: float, took: float, whole: list[tuple[float, float]]) -> int:
        """The place of the depth to draft. whole: of each, output tokens and seconds if all of it is verified."""
        self.saved = [saved + self.stride * PROBES_COST / (len(DEPTHS) - 1) for saved in self.saved]
        self.since += self.stride
        left = {
            place: self.saved[place] - (seconds - gained * took / tokens) / took
            for place, (gained, seconds) in enumerate(whole)
            if place != best
        }
        place = max(left, key=lambda one: left[one])
        if self.since < PROBE_EVERY:
            return best
        self.margin = min([self.margin, abs(left[place])])
        if left[place] < 0.0:
            return best
        self.margin = min([self.margin, *(left[place] - left[other] for other in left if other != place)])
        self.saved[place], self.since, self.probing = 0.0, 0, True
        return place

    def keep(self, chances: Sequence[Sequence[float]], own: Sequence[Limits] = ()) -> list[int]:
        """Kept tokens of each request, what is asked for and then the most likely ones, as many as give most output per
        second. own: as of `depth`."""
        requests, depth = len(chances), len(chances[0])
        falling = [[min(row[: n + 1]) for n in range(depth)] for row in chances]
        self._see([sum(row[n] for row in falling) / requests for n in range(depth)], requests)
        if self.packed and not self.probing:
            return self.spend(falling, depth, own)
        return [self._left(row, limits) for row, limits in zip(falling, own or [FREE] * requests, strict=True)]

    def spend(self, falling: Sequence[Sequence[float]], depth: int, own: Sequence[Limits] = ()) -> list[int]:
        """As keep, of chances that fall already and need not be equally many."""
        requests = len(falling)
        each = list(zip(falling, own or [FREE] * requests, strict=True))
        left = [(limits.asks, ps[: self._left(ps, limits)]) for ps, limits in each]
        found = sorted(
            ((asks, p, -n, -row) for row, (asks, ps) in enumerate(left) for n, p in enumerate(ps)), reverse=True
        )
        gains, asked = [p for _, p, _, _ in found], sum(asks for asks, _, _, _ in found)
        counts = range(asked, len(found) + 1)
        best = counts[self.best([(requests + sum(gains[:n])) / self.seconds(requests, n, depth) for n in counts])]
        taken = Counter(-row for _, _, _, row in found[:best])
        return [taken[row] for row in range(requests)]

    def _see(self, means: list[float], requests: int) -> None:
        for n, mean in enumerate(means):
            above = means[n - 1] if n else 1.0
            if n < len(self.tokens):
                self.counts[n] += requests
                weight = max(min(FORGET, FORGET_ONE * requests), requests / self.counts[n])
                self.tokens[n] += weight * (mean - self.tokens[n])
                self.above[n] += weight * (above - self.above[n])
            else:
                self.tokens.append(mean)
                self.above.append(above)
                self.counts.append(requests)
        self.whole += len(means) == D_MAX

    def seconds(self, requests: int, count: int, depth: int) -> float:
        curve = self.curve
        draft = max(0, depth - 1) * curve.draft_s(requests)
        extend = 0.0 if self.skips and not depth else curve.draft_extend
        return float(curve.verify_s(torch.tensor(requests + count))) + draft + curve.fixed + extend

    def best(self, rates: list[float], ties: bool = False) -> int:
        """ties: may be, as the same choice twice is none: at depth 1 as at 0 nothing may be verified, and neither has a
        draft pass."""
        best = max(range(len(rates)), key=lambda n: (rates[n], -n))
        others = [rate for n, rate in enumerate(rates) if n != best and not (ties and rate == rates[best])]
        self.margin = min([self.margin, *(abs(rate / rates[best] - 1) for rate in others)])
        return best


@dataclass
class LaggedPlan(Plan):
    """The same by steps before: of the drafted ones, all but the newest can be known when a step is decided. HELD steps
    are decided together, unless it is another number of requests, and so many are learnt from together."""

    packed: bool = True
    unread: list[list[list[float]]] = field(default_factory=list)
    heard: list[list[list[float]]] = field(default_factory=list)
    # decided: requests, depth and rows; for how many steps more; steps since then
    held: tuple[int, int, int] = (0, 0, 0)
    left: int = 0
    stride: int = 0
    # by depth: requests of a step, and the sums of its best 0, 1, 2, ... chances
    known: dict[int, deque[tuple[int, list[float]]]] = field(default_factory=dict)

    def begin(self, requests: int) -> tuple[int, int]:
        """How deep the next step drafts, and the rows of the target's pass."""
        if len(self.unread) == 2:
            self.heard.append(self.unread.pop(0))
        if len(self.heard) == HELD:
            for falling in self.heard:
                self._learn(falling)
            self.heard.clear()
        self.left -= 1
        self.stride += 1
        if self.left > 0 and self.held[0] == requests:
            self.depths.append(self.held[1])
        else:
            depth = self.depth(requests)
            self.held, self.stride = (requests, depth, self._rows(requests, depth)), 0
            self.left = 0 if self.probing else HELD
        return self.held[1:]

    def note(self, chances: Sequence[Sequence[float]]) -> None:
        """Of a step that drafted."""
        self.unread.append([[min(row[: n + 1]) for n in range(len(row))] for row in chances])

    def _learn(self, falling: list[list[float]]) -> None:
        requests, depth = len(falling), len(falling[0])
        self._see([sum(row[n] for row in falling) / requests for n in range(depth)], requests)
        best = sorted((p for row in falling for p in row), reverse=True)
        sums = [math.fsum(best[:n]) for n in range(len(best) + 1)]
        self.known.setdefault(depth, deque(maxlen=MEMORY)).append((requests, sums))

    def _rows(self, requests: int, depth: int) -> int:
        steps = self.known.get(depth)
        if depth and steps and not self.probing:
            rates = []
            for count in range(requests * depth + 1):
                gains = [requests / then * at(sums, count * then / requests) for then, sums in steps]
                rates.append((requests + sum(gains) / len(gains)) / self.seconds(requests, count, depth))
            return requests + self.best(rates)
        return requests * (depth + 1)


def at(sums: Sequence[float], place: float) -> float:
    """Between two of them."""
    left = min(int(place), len(sums) - 2)
    return sums[left] + (sums[left + 1] - sums[left]) * (min(place, len(sums) - 1) - left)
