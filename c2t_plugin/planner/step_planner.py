"""`--speculative-c2t-planner`: how deep each step drafts, and how much of that it verifies, all requests together.

One file, since each decision of a step reads what the others have left of it.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from c2t_plugin.errors import C2TError
from c2t_plugin.planner import CostCurve, OwnLimits, Planner, draft_passes
from c2t_plugin.planner.budget import falling
from c2t_plugin.planner.learnt import confidence_of
from c2t_plugin.planner.ledger import Ledger
from c2t_plugin.planner.pace import Pace
from c2t_plugin.planner.planner import WHOLE_FIRST
from c2t_plugin.planner.profile import CostProfile, lengths_to

if TYPE_CHECKING:
    from c2t_plugin.planner.ahead import DraftEnd, Prices
    from c2t_plugin.planner.calibration import Calibration
    from c2t_plugin.planner.following import Outcome
    from c2t_plugin.planner.network import Network
    from c2t_plugin.planner.network_learner import NetworkLearner
    from c2t_plugin.planner.readback import Readback

logger = logging.getLogger(__name__)

# Seconds between two reports of what was learnt.
TELL_EVERY_S = 60.0
# Steps, and drafts at most, that are learnt from together.
TOGETHER, DRAFTS_TOGETHER = 8, 64
# Steps that a planner which waits for nothing decides together: the host of a GPU has no time to spare.
HELD = 8


class StepPlanner:
    """Drafts, and spends the target's pass, where the cost curve and the confidences of the draft say that it pays.

    How deep a step drafts follows from the steps before it; how much of that is verified, from its own confidences,
    or, once it has to `wait_for_nothing`, from the steps before too. Confidences say nothing about a token's own random
    draw, so neither does a choice.

    curve: None measures one on the first steps, unless it is to `resume`, writes it to the path if there is one, and
    goes on measuring what whole steps take; one that is given holds. calibration: what confidences turn out to mean;
    None: nothing is learnt. sizes: token counts of the target's captured passes. steps: of the deepest draft. most:
    draft tokens of one request that can be verified. depths: that can be drafted, rising, from 0 to `steps`; without
    them every draft is whole.
    """

    _kind = Planner

    def __init__(
        self,
        curve: CostCurve | None,
        path: Path | None,
        *,
        steps: int,
        most: int,
        device: torch.device,
        depths: Sequence[int] = (),
        calibration: Calibration | NetworkLearner | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.active = True
        self.sizes: Callable[[], Sequence[int]] = tuple
        # Counts the tokens of all requests of the step at hand, where somebody does.
        self.context: Callable[[], int] = lambda: 0
        # Whether what is not verified is not computed; without that every drafted token is verified.
        self.packed = False
        # Whether the step at hand decodes alone, so that its time says what decoding costs.
        self.measurable = True
        # Whether plain steps do without draft extend.
        self.skips = False
        # Where a draft can end between any two of its passes.
        self.draft_end: DraftEnd | None = None
        self._open = False
        self._own: Sequence[OwnLimits | None] = ()
        # of steps decided together: requests, depth and rows; how many they are, and how many are over
        self._together: tuple[int, int, int | None] = 0, 0, None
        self._holds = self._age = 0
        self._heard: list[Tensor] = []
        self.depths = tuple(depths)
        # Of these, how many of the lowest may be chosen.
        self.allowed = len(self.depths)
        # Of the step at hand; rows: of the target's pass, None where its own confidences decide.
        self.depth = steps
        self.rows: int | None = None
        self._whole = False
        self._unread: Readback | None = None
        self._steps, self._path = steps, path
        self._planner: Planner | None = None
        # of whole drafts that were measured, see `keep`, until there is a planner to learn from them
        self._early: deque[Tensor] = deque(maxlen=WHOLE_FIRST)
        self._profile: CostProfile | None = None
        # sizes of batch that its newest curve is of
        self._known = 0
        self.pace: Pace | None = None  # of whole steps, where a curve is measured
        self._calibration = calibration
        # hear `state` where something was learnt, once a minute
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        # is told what was measured, see CostProfile.measured, where that is more than before
        self.keep_measured: Callable[[dict[str, Any]], None] | None = None
        self._clock, self._told = clock, (-math.inf, 0)
        if curve is None:
            # on a CPU a step has ended when the next one begins
            self.pace = Pace(settled=int(device.type != "cpu"), clock=clock)
            wait = torch.get_device_module(device).synchronize
            self._profile = CostProfile(self.depths or lengths_to(most), wait, clock)
        else:
            self.curve = curve
        self._forced: int | None = None
        self._ledger = Ledger()
        # of steps that are not learnt from yet, as `learn` takes them
        self._outcomes: list[Outcome] = []
        # seconds that the step at hand was expected to take
        self._promised_s: float | None = None

    def wait_for_nothing(self, requests: int, device: torch.device | str) -> None:
        """Decide by steps before, whose confidences `note` brings. requests: of the largest batch."""
        from c2t_plugin.planner.readback import Readback

        self._unread = Readback(device, 4 * requests * self._steps, torch.float32)

    def verify_windows(self) -> None:
        """Take back that rows are packed, and that steps before decide."""
        self.packed, self.sizes, self._unread = False, tuple, None

    @property
    def curve(self) -> CostCurve | None:
        """What is decided by; None as long as it is measured."""
        return None if self._planner is None else self._planner.curve

    @curve.setter
    def curve(self, curve: CostCurve) -> None:
        if self._planner is None:
            self._planner = self._kind(curve, self._steps, depths=self.depths or None, pace=self.pace)
            for sure in self._early:
                self._planner.observe(self._meant(sure))
        self._planner.curve = curve

    @property
    def measures(self) -> bool:
        """Whether it measures a curve of its own."""
        return self._profile is not None

    def resume(self, measured: Any) -> None:
        """Decide from the first step on by what another planner of such steps has measured, and measure what that has
        not. Raises ConfigError for what is nothing of the kind."""
        assert self._profile is not None
        profile = self._profile.resumed(measured)
        curve = profile.curve()
        assert curve is not None
        self.curve, self._profile = curve, profile

    @property
    def _decides(self) -> bool:
        return self.active and bool(self.packed or self.depths)

    @contextmanager
    def timed(self, part: str, count: Callable[[], int]) -> Iterator[None]:
        """See CostProfile.timed. Of every step it is noted how much the target computes."""
        if self._profile is None or self._forced is None:
            yield
        else:
            # a chain of one has no draft pass, but a curve has to have a cost
            passes = max(draft_passes(self.depth), int(self.depth == self._steps)) if part == "draft" else 1
            with self._profile.timed(part, count, passes):
                yield
        if part == "verify":
            self.ran(count())

    def ran(self, rows: int) -> None:
        """How many tokens the target's pass of the step at hand has."""
        if self.pace is not None:
            self.pace.verifies(rows)

    def seed(self, seconds: Mapping[int, float]) -> None:
        """See CostProfile.seed; a curve that is given holds."""
        if self._profile is not None:
            self._profile.seed(seconds)

    def took(self, part: str, count: int, seconds: float) -> None:
        """See CostProfile.took."""
        if self._profile is not None and self._forced is not None:
            self._profile.took(part, count, seconds)

    def interrupt(self) -> None:
        """Something else than a step runs, such as a prefill."""
        if self.pace is not None:
            self.pace.interrupt()

    @property
    def learns(self) -> bool:
        """Whether it wants to know what became of the draft tokens."""
        return self._calibration is not None

    @property
    def network(self) -> Network | None:
        """The one in force, where the classifier itself is learnt too."""
        return None if self._calibration is None else self._calibration.network

    def learn(self, *outcomes: Outcome) -> None:
        """What became of a step's drafts, on the host, and of earlier ones as far as it is known by now: see `keep`,
        and Calibration.observe. Where a network learns, each token's entropy and margin stand behind its log
        probability: (requests, tokens, 4). Not to be written to afterwards: of few requests several steps are learnt
        from together, since each alone costs as much."""
        if self._calibration is None:
            return
        self._outcomes.append(_joined(outcomes))
        if len(self._outcomes) >= TOGETHER or sum(len(each[1]) for each in self._outcomes) >= DRAFTS_TOGETHER:
            self._take_in(self._calibration)

    def _take_in(self, calibration: Calibration | NetworkLearner) -> None:
        """Learn from what has come, if anything has."""
        if not self._outcomes:
            return
        steps, (sure, verified, accepted, owners) = len(self._outcomes), _joined(self._outcomes)
        self._outcomes = []
        tried = torch.arange(sure.shape[1]) < verified[:, None]
        hoped = (falling(self._meant(sure)) * tried).sum()
        self._ledger.add("tokens", len(verified) + float(hoped), len(verified) + float(accepted.sum()))
        calibration.learn(sure, verified, accepted, owners, steps)
        when, fits = self._told
        if calibration.fits > fits and self._clock() >= when + TELL_EVERY_S:
            self._told = self._clock(), calibration.fits
            state = self.state()
            for listener in self.listeners:
                listener(state)

    def _meant(self, sure: Tensor) -> Tensor:
        confidence, log_prob = confidence_of(sure)
        return confidence if self._calibration is None else self._calibration(confidence, log_prob)

    def begin(self, requests: int, whole: bool = False, own: Sequence[OwnLimits | None] = ()) -> int:
        """How deep to draft, asked before each step. whole: a request of it needs all its drafts. own: see
        Planner.depth."""
        if self._calibration is not None:
            self._calibration.settle()
        before, self._forced = self._forced, None
        self.depth = self._steps
        if self.pace is not None:
            took = self.pace.begin(requests, self.context)
            if took is not None and self._promised_s is not None:
                self._ledger.add("seconds", self._promised_s, took)
        self._promised_s, self._open, self._own = None, False, own
        if self._planner is not None:
            self._planner.probing = False
        if self._unread is not None and self._unread.full and self._planner is not None:
            self._hear(self._planner, self._unread.read())
        self._whole = whole
        if self._decides and not whole:
            self._choose(requests, before)
        if self.pace is not None:
            self.pace.drafts(self.depth, draft_passes(self.depth))
        return self.depth

    def _hear(self, planner: Planner, sure: Tensor) -> None:
        """Learn from a step before, what `note` was told of it, with the HELD - 1 after it."""
        self._heard.append(sure)
        if len(self._heard) < HELD:
            return
        for _, alike in itertools.groupby(self._heard, lambda heard: heard.shape[1:]):
            those = list(alike)
            for each in self._meant(torch.cat(those)).split([len(heard) for heard in those]):
                planner.observe(each)
        self._heard.clear()

    def _choose(self, requests: int, before: int | None) -> None:
        if self._profile is not None:
            self._forced = self._profile.length(requests) if self.measurable else None
            known = len(self._profile.sizes)
            if before is not None and self._forced is None and known > self._known:
                curve = self._profile.curve()
                self._known = 0 if curve is None else known
                self._learn(curve)
        if self.depths and self._forced is not None:
            self.depth = self._forced
        elif self.depths and self._planner is not None:
            self._plan(self._planner, requests)

    def _plan(self, planner: Planner, requests: int) -> None:
        planner.packed, planner.skips, planner.allowed = self.packed, self.skips, self.allowed
        self._age += 1
        if self._age >= self._holds or self._together[0] != requests or any(self._own):
            self._together = requests, planner.depth(requests, self._own, self._age), None
            alone = self._unread is None or planner.probing or any(self._own)
            self._age, self._holds = 0, 1 if alone else HELD
        self.depth = self._together[1]
        self._promised_s = planner.promised_s
        ends = self.draft_end is not None and not planner.probing
        self._open = ends and self.depth > 0 and self._unread is None
        if self._open:
            self.depth = self.depths[self.allowed - 1]

    def goes_on(self, drafted: int, confidence: Sequence[float], log_prob: Sequence[float]) -> bool:
        """Whether the step at hand drafts one more token than the `drafted` that it has, asked after each, where
        `begin` was told of each request what it has set for itself, by row. Of each its newest token: see Chances.add.
        """
        if self.draft_end is None:
            return True
        if drafted == 1:
            self.draft_end.begin(self.prices(len(confidence)), self._own)
        return self.draft_end.goes_on(confidence, log_prob)

    def prices(self, requests: int) -> Prices | None:
        """What drafts of the step at hand end by, in whichever process; None: they are as deep as `depth`."""
        if not self._open or self._planner is None or self.draft_end is None:
            return None
        learnt = None if self._calibration is None else self._calibration.in_force
        return self.draft_end.prices(self._planner, requests, learnt)

    def ended(self, depth: int) -> None:
        """The draft of the step at hand has ended at this depth."""
        self.depth = depth
        if self.pace is not None:
            self.pace.drafts(depth, draft_passes(depth))

    def follow(self, depth: int) -> None:
        """The step at hand drafts so deep, whatever `begin` said: another planner decides for this one too."""
        if depth == self.depth:
            return
        if self._forced is not None and self._profile is not None:
            self._profile.skip()
            self._forced = None
        if self._planner is not None:
            self._planner.probing = False
        self.ended(depth)

    def plan_rows(self, requests: int) -> int | None:
        """Rows of the target's pass of the step at hand, by steps before; None where its own confidences decide.

        To be asked when its depth is in force, with which `sizes` change.
        """
        if self._unread is None:
            return None
        if self._planner is None or self._forced is not None or self._whole or not self._decides:
            return requests * (self.depth + 1)
        *of, rows = self._together
        if rows is None or of != [requests, self.depth]:
            rows = self._planner.rows(requests, self.depth, self.sizes())
            self._together = requests, self.depth, rows
            self._promised_s = self._planner.promised_s
        return rows

    def note(self, sure: Tensor) -> Tensor:
        """sure: see `keep`; of a step that waited for nothing, the same on all ranks. Returns it, where it was copied
        to the host that copy; see Readback.write."""
        if self._unread is not None and self._planner is not None and self._forced is None and self._decides:
            return self._unread.write(sure)
        return sure

    def _learn(self, curve: CostCurve | None) -> None:
        if curve is None or curve == self.curve:
            return
        self.curve = curve
        logger.info("C2T: cost of a step, measured: %s", curve)
        if self._path is not None:
            from c2t_plugin.planner.curve_file import write_curve

            try:
                write_curve(curve, self._path)
            except (OSError, C2TError) as error:
                logger.error("C2T: the cost curve cannot be written to %s: %s", self._path, error)
        if self.keep_measured is not None and self._profile is not None:
            self.keep_measured(self._profile.measured())
            # which took time of its own
            self.interrupt()

    def keep(self, kept: Tensor, own: Tensor, sure: Tensor) -> Tensor:
        """(rows,) int32 draft tokens to verify. kept: (rows,) int32, at most so many. own: (rows,) bool, requests that
        have a beta of their own; of those it is exactly so many. sure: (rows, tokens) float32 confidences of a
        request's draft tokens in the order in which they are taken; or (rows, tokens, 2 or more), with the logarithm of
        the draft's own probability of each, and what else is known, behind it."""
        if not self._decides:
            return kept
        if self._forced is not None:
            if self.depths and self._planner is None and self._forced == self._steps:
                self._early.append(sure.cpu().clone())
            return torch.where(own, kept, kept.clamp(max=self._forced))
        if self._planner is None:
            return kept
        # the one wait, and one copy: the host chooses the graph
        if kept.is_cpu:
            acceptance, longest, exact = self._meant(sure), kept.long(), own
        else:
            host = torch.cat([sure.flatten(1), kept[:, None], own[:, None]], dim=1).cpu()
            acceptance, longest, exact = self._meant(host[:, :-2].view(sure.shape)), host[:, -2].long(), host[:, -1] > 0
        return self._spent(acceptance, longest, torch.where(exact, longest, 0)).int().to(kept.device)

    def _spent(self, acceptance: Tensor, longest: Tensor, at_least: Tensor) -> Tensor:
        """(rows,) int64, see Planner.keep."""
        assert self._planner is not None
        self._planner.packed = self.packed
        budget = self._planner.keep(acceptance, longest, at_least, self.sizes())
        self._promised_s = self._planner.promised_s
        return budget

    def state(self) -> dict[str, Any]:
        """active: whether it decides. curve: whether it has one to decide by. depth: of the last step's draft. learnt:
        see Calibration.state. step_seconds: see Pace.state. came: see Ledger.state."""
        if self._calibration is not None:
            self._take_in(self._calibration)
        learnt = None if self._calibration is None else self._calibration.state()
        pace = None if self.pace is None else self.pace.state()
        known = {"active": self._decides, "curve": self.curve is not None, "depth": self.depth}
        return {**known, "learnt": learnt, "step_seconds": pace, "came": self._ledger.state()}


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """One after the other; what a draft is shorter by is NaN."""
    if len(outcomes) == 1:
        return outcomes[0]
    mine, width = [each[0] for each in outcomes], max(each[0].shape[1] for each in outcomes)
    missing = (each.new_full((len(each), width - each.shape[1], *each.shape[2:]), math.nan) for each in mine)
    sure = torch.cat([torch.cat(each, 1) for each in zip(mine, missing, strict=True)])
    verified, accepted = (torch.cat(each) for each in zip(*(each[1:3] for each in outcomes), strict=True))
    return sure, verified, accepted, [owner for each in outcomes for owner in each[3]]
