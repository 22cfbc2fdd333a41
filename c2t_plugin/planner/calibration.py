"""What the classifier's confidences mean on this server: learnt from what its target accepts, with them as the prior.

A classifier was fitted on some pair. On another, or on other text, it ranks draft tokens well and is wrong about how
many are accepted. It is mended where it matters: the chance of a token whose chain was accepted up to it. On that
chance's logit there is a slope, an offset for each depth, and the weight of the draft's own logit of the token.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.contrary import NEWEST
from c2t_plugin.planner.fitting import FIT_EVERY, Evidence, Verdict, judged, of_this_pair
from c2t_plugin.planner.learnt import Learnt, chance, confidence_of, features_of, lost

if TYPE_CHECKING:
    from c2t_plugin.planner.network import Network

logger = logging.getLogger(__name__)

# Drafts that a fit is judged by, and told of; and that come before the first fit, at the beginning.
WINDOW, FIRST_FIT = 1024, 16
# Steps between two fits, once a window is full; of that, what a single request may fill.
STEPS, MOST_OF_ONE = 8, WINDOW // 16


class Calibration:
    """Fits a Learnt to the verified draft tokens of the last steps.

    Verified tokens are evidence, and where an adapter knows their text those that were cut, down to the first that is
    refused. Whether one is verified follows from confidences, which the fit has, and not from its outcome, so the cut
    does not bend it. Tokens of sampled requests count: that is how often they are accepted. A step's outcome changes
    later steps only.

    Later drafts judge each fit. Where the fit before predicted the newest of them better, or the classifier's own
    confidences these or those of the window, they hold again until the next fit.
    """

    # of what learns the network too: the one in force
    network: Network | None = None

    def __init__(
        self, d_max: int, *, trusted: bool = False, start: Learnt | None = None, thread: Executor | None = None
    ) -> None:
        """trusted: whether the classifier was fitted on this very pair, so that few outcomes say little against it.
        start: what an earlier server has learnt, of as many depths. thread: where fits are made; None: where outcomes
        are told, at once."""
        self._thread, self.failed = thread, False
        self._fitting: Future[Verdict] | None = None
        self.fits = self.discarded = self.turns = 0
        self._plain = of_this_pair(d_max) if trusted else Learnt.nothing(d_max)
        self.learnt = self._before = start or self._plain
        # draft tokens, those of earlier servers too
        self.seen = self.learnt.seen
        self._count = self._since = self._steps = 0
        # a row per draft: see `_features`; what was expected of it by the classifier and by what was learnt until then
        self._features = np.zeros((WINDOW, d_max, 2))
        self._expected = np.zeros((2, WINDOW, d_max))
        # of each draft's tokens, whether it has a confidence and was verified, and how many were accepted
        self._known = np.zeros((WINDOW, d_max), dtype=bool)
        self._accepted = np.zeros(WINDOW, dtype=np.int64)
        # whose drafts are in the window, in their order
        self._held: Counter[Hashable] = Counter()
        self._entered: deque[Hashable] = deque()
        # of those, whom the newest drafts speak against
        self.contrary: set[Hashable] = set()

    @property
    def in_force(self) -> Learnt | None:
        """What confidences are taken for; None: for what they say."""
        return None if self.learnt is self._plain else self.learnt

    def __call__(self, confidence: Tensor, log_prob: Tensor | None = None) -> Tensor:
        """(requests, drafted) float64 in [0, 1] of (requests, drafted) confidences, and of the logarithm of the
        draft's own probability of its tokens, where it is known; NaN stays."""
        if (learnt := self.in_force) is None:
            return confidence.double()
        found = chance(learnt, features_of(confidence, log_prob))
        return torch.from_numpy(np.where(np.isnan(confidence.numpy()), np.nan, found))

    def settle(self) -> None:
        """To be called between two steps: a fit that a thread has made is put in force."""
        if self._fitting is None or not self._fitting.done() or self.failed:
            return
        try:
            self._take(self._fitting.result())
            self._fitting = None
        except Exception as error:  # a server that cannot fit serves on
            self.failed = True
            logger.error("C2T: learns no further, what is in force stays: %s", error)

    def learn(
        self, sure: Tensor, verified: Tensor, accepted: Tensor, owners: Sequence[Hashable] = (), steps: int = 1
    ) -> None:
        """See StepPlanner.learn. steps: that these are of."""
        confidence, log_prob = confidence_of(sure)
        self.observe(confidence, verified, accepted, owners, log_prob, steps)

    def observe(
        self,
        confidence: Tensor,
        verified: Tensor,
        accepted: Tensor,
        owners: Sequence[Hashable] = (),
        log_prob: Tensor | None = None,
        steps: int = 1,
    ) -> list[int]:
        """The outcome of some steps. confidence, log_prob: (requests, drafted), as they were. verified, accepted:
        (requests,) int64 draft tokens of each. owners: which request each is; without them none has a share that it
        may not pass. Returns the rows of those that were taken."""
        depths = confidence.shape[1]
        known = (np.arange(depths) < verified.numpy()[:, None]) & np.isfinite(confidence.numpy())
        rows = known.any(1).nonzero()[0].tolist()
        rows = [row for row in rows if not owners or self._enters(owners[row])]
        if not rows:
            return []
        features, known = features_of(confidence, log_prob)[rows], known[rows]
        place = (self._count + np.arange(len(rows))) % WINDOW
        self._features[place, :depths] = features
        for column, each in enumerate((self._plain, self.learnt)):
            self._expected[column, place, :depths] = chance(each, features)
        self._known[place] = False
        self._known[place, :depths] = known
        self._accepted[place] = accepted.numpy()[rows]
        self.seen += int(known.sum())
        self._count += len(rows)
        self._since += len(rows)
        self._steps += steps
        enough = self._since >= min(FIT_EVERY, max(FIRST_FIT, self._count // 4))
        if enough and (self._count < WINDOW or self._steps >= STEPS) and self._fitting is None:
            self._fit()
        return rows

    def lost(self, drafts: int) -> Array:
        """(drafts,) nats of the outcome of each of the newest ones, as it was foretold; at most the window's."""
        newest = (self._count - drafts + np.arange(drafts)) % WINDOW
        return lost(self._expected[1, newest], self._hits()[newest], self._known[newest])

    def succeed(self, before: Calibration) -> None:
        """Go on in the place of one that took the same drafts: counts, and whose drafts they were."""
        self._held, self._entered = before._held, before._entered
        self.fits, self.discarded = before.fits + self.fits, before.discarded
        self.turns, self.seen = before.turns, before.seen

    def _enters(self, owner: Hashable) -> bool:
        """Whether the window takes one more draft of this request, and then it does."""
        if self._held[owner] >= MOST_OF_ONE:
            return False
        self._held[owner] += 1
        self._entered.append(owner)
        if len(self._entered) > WINDOW:
            gone = self._entered.popleft()
            self._held[gone] -= 1
            if not self._held[gone]:
                del self._held[gone]
        return True

    def state(self) -> dict[str, Any]:
        """See `told.state_of`."""
        # who serves without being asked does not load it
        from c2t_plugin.planner.told import state_of

        return state_of(self)

    def window(self) -> tuple[Array, Array, Array]:
        """Of the drafts that are remembered: (drafts, d_max) bool, which tokens were verified, and accepted; and (2,
        drafts, d_max) what was expected of them, by the classifier and by what was learnt until then."""
        size = min(self._count, WINDOW)
        return self._known[:size], self._hits()[:size], self._expected[:, :size]

    def _hits(self) -> Array:
        return np.arange(self._known.shape[1]) < self._accepted[:, None]

    def _fit(self) -> None:
        """Of a copy, since drafts come while a thread fits."""
        size = min(self._count, WINDOW)
        new = min(self._since, size)
        rows = (self._count - size + np.arange(size)) % WINDOW
        newest = rows[-max(new, NEWEST) :]
        owners = list(self._entered)[-len(newest) :]
        window = self._features[newest], self._known[rows], self._hits()[rows], self._expected[:, rows]
        evidence = Evidence(self._plain, self.learnt, self._before, self.seen, new, owners, *window)
        self._since = self._steps = 0
        if self._thread is None:
            return self._take(judged(evidence))
        try:
            self._fitting = self._thread.submit(judged, evidence)
        except RuntimeError as error:  # an interpreter that ends begins nothing; whoever serves on hears of it
            self._fitting = Future()
            self._fitting.set_exception(error)

    def _take(self, verdict: Verdict) -> None:
        self.learnt, self._before, self.contrary, discarded, turned = verdict
        self.fits, self.discarded, self.turns = self.fits + 1, self.discarded + discarded, self.turns + turned
