"""A planner in vLLM's scheduler process: how deep the workers draft, and how much of that is verified.

vLLM asks a table by the number of requests how deep a step drafts (its dynamic speculative decoding); this stands in
the table's place. The worker tells with its drafts how sure it is of them and how long it took to make them; what is
left of the step's time is the target's. Nothing of vLLM is imported here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from c2t_plugin.engines.patching import ATTRIBUTE, replaced
from c2t_plugin.engines.vllm.ending import Sent
from c2t_plugin.planner import CostCurve, OwnLimits, draft_passes, switched_depths
from c2t_plugin.planner.ahead import DraftEnd
from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.following import Outcome, Told, Untold, outcome
from c2t_plugin.planner.sparing import SparingPlanner
from c2t_plugin.planner.step_planner import StepPlanner

if TYPE_CHECKING:
    from c2t_plugin.planner.calibration import Calibration
    from c2t_plugin.planner.network_learner import NetworkLearner


class Drafted(NamedTuple):
    """What a worker says of a draft, set on the drafts that it hands to the scheduler.

    confidence: of each request its tokens', in the order of the drafts; NaN where it is not known. extend_s: seconds
    until the first token. seconds: of the whole draft. log_prob: as confidence, the logarithm of the draft's own
    probability of each; nothing where that is not known. stats: of each request its tokens' entropies and margins,
    where a network learns. classifier_s: of those seconds, statistics, confidences and cuts. overlaps: whether the
    target's tokens are handed over while the draft is made. tokens: of each request, where the drafts have none.
    """

    confidence: list[list[float]]
    extend_s: float
    seconds: float
    log_prob: Sequence[list[float]] = ()
    stats: Sequence[list[list[float]]] = ()
    classifier_s: float = 0.0
    overlaps: bool = False
    tokens: Sequence[list[int]] = ()

    def sure(self, stats: bool = False) -> Array:
        """(requests, tokens, 2) float32 of both, NaN where they are not known; with `stats` behind them (.., 4)."""
        confidence, log_prob = (np.array(each, dtype=np.float32) for each in (self.confidence, self.log_prob))
        found = np.full((*confidence.shape, 4 if stats else 2), np.nan, dtype=np.float32)
        found[..., 0] = confidence
        if log_prob.shape == confidence.shape:
            found[..., 1] = log_prob
        if stats and (others := np.array(self.stats, dtype=np.float32)).shape == (*confidence.shape, 2):
            found[..., 2:] = others
        return found


class Planning:
    """Decides for one scheduler. Called in this order: `begin`, `__getitem__` by vLLM, `sent`, `learn`, `ran`,
    `judged`, `kept`.

    `learn` comes while the workers compute. For all else they wait.
    """

    def __init__(
        self,
        curve: CostCurve | None,
        path: Path | None,
        d_max: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        calibration: Calibration | NetworkLearner | None = None,
        ends: bool = False,
        skips: bool = False,
        few: bool = False,
        spares: bool = False,
    ) -> None:
        """curve: None measures one on the first steps and, if there is a path, writes it there. calibration: see
        StepPlanner. ends: whether workers can end a draft on its way. skips: whether they read plain steps later. few:
        whether each depth has CUDA graphs of its own. spares: whether scores are computed on the host, so that a draft
        without them is faster."""
        cpu = torch.device("cpu")
        # a draft that can end is begun whole or not at all: no need to measure every depth
        depths = switched_depths(d_max) if ends or few else range(d_max + 1)
        shape: dict[str, Any] = {"steps": d_max, "most": d_max, "device": cpu, "depths": depths}
        # that scores have taken, as workers tell it
        self._scored_s = 0.0
        kind = functools.partial(SparingPlanner, scored_s=lambda: self._scored_s) if spares else StepPlanner
        self.planner: StepPlanner = kind(curve, path, **shape, calibration=calibration, clock=clock)
        self.planner.packed, self.planner.skips = True, skips
        self.planner.draft_end = DraftEnd() if ends else None
        if (pace := self.planner.pace) is not None:
            # `learn` does it, which nobody waits for
            pace.may_renew = False
        # of those requests of the step at hand that set limits for themselves, as a planner counts them
        self.own: Callable[[], Sequence[OwnLimits]] = tuple
        # of the newest drafts the requests' rows, and what Drafted.sure has of them
        self._rows: dict[str, int] = {}
        self._sure = np.zeros((0, 0, 2), dtype=np.float32)
        # Whether draft tokens are drawn: one of those is accepted more often than the target draws the same.
        self.drawn = False
        # of those drafts that were cut, and are not drawn, how many tokens were left, and the others
        self.rest: dict[str, tuple[int, Sequence[int]]] = {}
        # by request, drafts that its text has not told all of
        self.untold: dict[str, list[Untold]] = {}
        # what `learn` has not learnt yet, as StepPlanner.learn takes it
        self._outcomes: list[Outcome] = []
        self._clock = clock
        self._started = self._seconds = 0.0
        self._decoding = False
        self._tokens = self._requests = 0

    def begin(self, *, decoding: bool) -> None:
        """A step is being scheduled. decoding: of requests that decode alone."""
        self._started, self._decoding, self._tokens = self._clock(), decoding, 0

    def __getitem__(self, requests: int) -> int:
        """How deep to draft in a step of so many requests."""
        self.planner.measurable = self._decoding
        return self.planner.begin(requests, own=self.own()[:requests])

    def sent(self, requests: int, reading: Sequence[str]) -> Sent | None:
        """What drafts of this step end by; None: they are as deep as was said. requests: that take drafts. reading: the
        others of the step."""
        prices = self.planner.prices(requests) if requests else None
        spared = isinstance(self.planner, SparingPlanner) and not self.planner.scores
        return Sent(prices, tuple(reading), scores=not spared) if prices is not None or spared else None

    def ran(self, tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]]) -> None:
        """The step is over. tokens: of each request, that the target read. drafts: those of them that were drafts."""
        self._seconds = self._clock() - self._started
        self._decoding &= all(count == 1 + len(drafts.get(name, ())) for name, count in tokens.items())
        self._tokens, self._requests = sum(tokens.values()), len(tokens)
        if self._decoding:
            self.planner.ran(self._tokens)
        else:
            self.planner.interrupt()

    def judged(
        self,
        verified: Mapping[str, int],
        accepted: Mapping[str, int],
        own: Mapping[str, int],
        text: Mapping[str, Sequence[int]],
        ended: Callable[[str], bool],
    ) -> None:
        """What became of drafts: of each request whose outcome is to be learnt from, how many of its draft tokens the
        target verified and accepted. own: where the text goes on, the target's own token behind these. text: of each
        request, what became part of its text, also of those that had no draft. ended: whether no more follows."""
        self._teach()
        sure, now, since = torch.from_numpy(self._sure), list[Told](), list[Told]()
        for name, untold in list(self.untold.items()):
            told = [(each, each.told(text.get(name, ()), ended(name))) for each in untold]
            since += [(each, ends, name) for each, ends in told if ends is not None]
            self.untold[name] = [each for each, ends in told if ends is None]
        for name in [name for name in verified if name in self._rows]:
            length, rest = self.rest.pop(name, (-1, ()))
            draft = Untold(sure, self._rows[name], rest, accepted[name])
            ends: tuple[int, int] | None = verified[name], accepted[name]
            if name in own and verified[name] == length > accepted[name]:
                # behind what was refused, nothing that was cut is accepted either
                ends = length + len(rest), accepted[name]
            elif name in own and verified[name] == length:
                ends = draft.told([own[name]], ended(name))
            if ends is None:
                self.untold.setdefault(name, []).append(draft)
            else:
                now.append((draft, ends, name))
        self.untold = {name: untold for name, untold in self.untold.items() if untold}
        if now or since:
            self._outcomes = [outcome(sure, now), *(outcome(one[0].sure, [one]) for one in since)]

    def learn(self) -> None:
        """Learn from what was judged last, and from what steps took."""
        pace, curve = self.planner.pace, self.planner.curve
        if pace is not None and curve is not None and self._requests:
            with replaced(pace, "may_renew", True):
                pace.costs(curve, self._requests, self.planner.skips)
        self._teach()

    def _teach(self) -> None:
        if self._outcomes:
            self.planner.learn(*self._outcomes)
            self._outcomes = []

    def kept(
        self, drafted: Drafted, names: Sequence[str], lengths: Sequence[int | None], own: Sequence[bool]
    ) -> list[int]:
        """How many tokens of each request's draft to verify. lengths: of the drafts; None of requests that are not in
        the next step, or do not decode there. own: requests that are cut by a beta of their own alone, as they have
        been."""
        sure = drafted.sure(stats=self.planner.network is not None)
        if self.planner.learns:
            # for `judged`
            self._rows, self._sure = {name: row for row, name in enumerate(names)}, sure
        depth = sure.shape[1]
        self._scored_s += drafted.classifier_s
        if not depth:
            # none was to be made, or vLLM has seen that nobody would take it
            self.planner.follow(0)
        elif depth < self.planner.depth:
            self.planner.ended(depth)
        self._learn(drafted)
        # of whose draft nothing is left has a row of the target's pass, and a token of it, all the same
        taking = {row: length for row, length in enumerate(lengths) if length is not None}
        found = [0] * len(lengths)
        if not depth or not taking:
            return found
        longest = torch.tensor(list(taking.values()), dtype=torch.int32)
        limited = torch.tensor([own[row] for row in taking])
        chosen = self.planner.keep(longest, limited, torch.from_numpy(sure[list(taking)])).tolist()
        for row, length in zip(taking, chosen, strict=True):
            found[row] = length
        return found

    def _learn(self, drafted: Drafted) -> None:
        if not self._decoding or not self._tokens:
            return
        depth, requests = self.planner.depth, self._requests
        # a step is over with both, and what the scheduler does meanwhile costs nothing
        seconds = self._clock() - self._started if drafted.overlaps else self._seconds
        self.planner.took("verify", self._tokens, max(seconds - drafted.seconds, 1e-9))
        # of each token; a planner that spares scores wants to know what drafts take without
        scores = drafted.classifier_s / depth if depth and isinstance(self.planner, SparingPlanner) else 0.0
        if depth:
            self.planner.took("draft_extend", requests, max(drafted.extend_s - scores, 1e-9))
        if passes := draft_passes(depth):
            seconds = (drafted.seconds - drafted.extend_s) / passes - scores
            self.planner.took("draft", requests, max(seconds, 1e-9))
        elif depth == self.planner.depths[-1]:
            # no chain has a draft pass, but a curve has to have a cost
            self.planner.took("draft", requests, drafted.extend_s)


def cut(planning: Planning, drafts: Any, takes: Callable[[str], bool], own: Sequence[OwnLimits | None]) -> None:
    """Shorten vLLM's DraftTokenIds in place. takes: whether a request takes a draft in its next step. own: what each
    has set for itself, by which model runner V1 has cut already, and V2 has not."""
    drafted: Drafted | None = getattr(drafts, ATTRIBUTE, None)
    if drafted is None or not drafted.confidence or len(drafted.confidence) != len(drafts.req_ids):
        return
    rows = zip(drafts.req_ids, drafts.draft_token_ids, drafted.confidence, own, strict=True)
    lengths = [_left(limits, chances, len(tokens)) if takes(name) else None for name, tokens, chances, limits in rows]
    exact = [limits is not None and limits.exact for limits in own]
    kept = planning.kept(drafted, drafts.req_ids, lengths, exact)
    # model runner V2 hands over no tokens, but where a grammar looks at them
    known = zip(drafts.req_ids, drafted.tokens or drafts.draft_token_ids, kept, strict=True)
    left = ((name, length, row[length:]) for name, row, length in known if length < len(row) and takes(name))
    planning.rest = {name: (length, rest) for name, length, rest in left if rest[0] >= 0 and not planning.drawn}
    drafts.draft_token_ids = [row[:length] for row, length in zip(drafts.draft_token_ids, kept, strict=True)]


def _left(limits: OwnLimits | None, chances: Sequence[float], length: int) -> int:
    """How much of a draft of this length a request's own limits leave."""
    if limits is None:
        return length
    rows = enumerate(chances[:length], start=1)
    return next((depth - 1 for depth, chance in rows if not limits.leaves(depth, chance)), length)
