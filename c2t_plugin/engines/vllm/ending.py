"""Drafts that end on their way in a worker, by what the planner in the scheduler's process has sent with the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from c2t_plugin.engines.host_scorer import HostScorer
from c2t_plugin.planner import OwnLimits
from c2t_plugin.planner.ahead import VERSION, DraftEnd, Prices
from c2t_plugin.planner.arrays import Array


class Sent(NamedTuple):
    """What travels on vLLM's SchedulerOutput.

    prices: None: drafts are as deep as vLLM was told. reading: requests of the step that are still in their prompt,
    whose drafts nobody takes. taken: parameters that drafts are scored by from here on, see ScoringNetwork.take.
    scores: whether the planner wants any of this step's drafts; see SparingPlanner.
    """

    prices: Prices | None
    reading: tuple[str, ...] = ()
    taken: tuple[Array, ...] | None = None
    scores: bool = True


class Ending:
    """Of one worker. Called in this order: `begin` for each draft, and `goes_on` after each of its tokens."""

    def __init__(self) -> None:
        # with the step at hand; None: its drafts are as deep as vLLM was told
        self.sent: Sent | None = None
        self._end = DraftEnd()
        self._rows: Sequence[int] = ()

    def begin(self, names: Sequence[str], own: Sequence[OwnLimits | None]) -> None:
        """Of the batch's requests, by row, their names and what each has set for itself."""
        self._end.begin(None)
        if self.sent is None:
            return
        prices, reading = self.sent.prices, self.sent.reading
        if prices is None or prices.version != VERSION:
            return
        self._rows = [row for row, name in enumerate(names) if name not in reading]
        if len(self._rows) == prices.requests:
            self._end.begin(prices, [own[row] for row in self._rows])

    @property
    def scores(self) -> bool:
        """Whether the planner wants the confidences of the draft at hand."""
        return self.sent is None or self.sent.scores

    def goes_on(self, scorer: HostScorer) -> bool:
        """Whether the draft, whose newest token was just scored, gets one more."""
        confidence, log_prob = scorer.newest()
        return self._end.goes_on((confidence[row] for row in self._rows), (log_prob[row] for row in self._rows))
