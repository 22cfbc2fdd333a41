"""What the classifier's confidences mean on this server: learnt from what its target accepts, with them as the prior.

A classifier was fitted on some pair. On another, or on other text, it ranks draft tokens well and is wrong about how
many are accepted. It is mended where it matters: the chance of a token whose chain was accepted up to it. On that
chance's logit there is a slope, an offset for each depth, and the weight of the draft's own logit of the token.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.planner.contrary import NEWEST, contrary
from c2t_plugin.planner.fitting import fitted, forgotten
from c2t_plugin.planner.learnt import Learnt, chance, confidence_of, features_of, nll

if TYPE_CHECKING:
    from c2t_plugin.planner.network import Network

# Drafts that a fit is judged by, and told of; and that come between two fits, fewer at the beginning.
WINDOW = 1024
FIT_EVERY, FIRST_FIT = 64, 16
# Steps between two fits, once a window is full: one a step would cost large batches a millisecond each.
STEPS = 8
# Of the window, what a single request may fill.
MOST_OF_ONE = WINDOW // 16
# Standard errors by which a fit has to predict worse.
DOUBT = 3.0


class Calibration:
    """Fits a Learnt to the verified draft tokens of the last steps.

    Verified tokens are evidence, and where an adapter knows it the first one that was cut, down to the first that is
    refused. Whether one is verified follows from confidences, which the fit has, and not from its outcome, so the cut
    does not bend it. Tokens of sampled requests count: that is how often they are accepted. A step's outcome changes
    later steps only.

    Later drafts judge each fit. Where the fit before predicted the newest of them better, or the classifier's own
    confidences these or those of the window, they hold again until the next fit.
    """

    # of what learns the network too: the one in force
    network: Network | None = None

    def __init__(self, d_max: int, *, applies: bool = True, start: Learnt | None = None) -> None:
        """applies: whether confidences are taken for what is learnt from the first fit on; without that it is watched,
        until it has predicted the window better than the classifier by more than chance. start: what an earlier server
        has learnt, of as many depths."""
        self.applies, self._proven = applies, False
        self.fits = self.discarded = self.turns = 0
        self._plain = Learnt.nothing(d_max)
        self.learnt = self._before = start or self._plain
        # draft tokens, those of earlier servers too
        self.seen = self.learnt.seen
        self._count = self._since = self._steps = 0
        # a row per draft: see `_features`; what was expected of it by the classifier and by what was learnt until then
        self._features = torch.zeros((WINDOW, d_max, 2), dtype=torch.float64)
        self._expected = torch.zeros((2, WINDOW, d_max), dtype=torch.float64)
        # whichever of the two was applied
        self._foretold = torch.zeros((WINDOW, d_max), dtype=torch.float64)
        # of each draft's tokens, whether it has a confidence and was verified, and how many were accepted
        self._known = torch.zeros((WINDOW, d_max), dtype=torch.bool)
        self._accepted = torch.zeros(WINDOW, dtype=torch.int64)
        # the same memory, written to in every step, which on so few numbers torch takes three times as long for
        window = (self._features, self._expected, self._foretold, self._known, self._accepted)
        self._written = tuple(each.numpy() for each in window)
        # whose drafts are in the window, in their order
        self._held: Counter[Hashable] = Counter()
        self._entered: deque[Hashable] = deque()
        # of those, whom the newest drafts speak against
        self.contrary: set[Hashable] = set()

    @property
    def applied(self) -> bool:
        """Whether confidences are taken for what is learnt."""
        return self.applies or self._proven

    @property
    def in_force(self) -> Learnt | None:
        """What confidences are taken for; None: for what they say."""
        return self.learnt if self.applied and self.learnt is not self._plain else None

    def __call__(self, confidence: Tensor, log_prob: Tensor | None = None) -> Tensor:
        """(requests, drafted) float64 in [0, 1] of (requests, drafted) confidences, and of the logarithm of the
        draft's own probability of its tokens, where it is known; NaN stays."""
        if (learnt := self.in_force) is None:
            return confidence.double()
        found = chance(learnt, features_of(confidence, log_prob))
        return torch.from_numpy(np.where(np.isnan(confidence.numpy()), np.nan, found))

    def settle(self) -> None:
        """To be called between two steps: what is to be in force is put in force. A calibration always is."""

    def learn(self, sure: Tensor, verified: Tensor, accepted: Tensor, owners: Sequence[Hashable] = ()) -> None:
        """See StepPlanner.learn."""
        confidence, log_prob = confidence_of(sure)
        self.observe(confidence, verified, accepted, owners, log_prob)

    def observe(
        self,
        confidence: Tensor,
        verified: Tensor,
        accepted: Tensor,
        owners: Sequence[Hashable] = (),
        log_prob: Tensor | None = None,
    ) -> list[int]:
        """The outcome of a step. confidence, log_prob: (requests, drafted), as they were. verified, accepted:
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
        all_features, expected, foretold, all_known, all_accepted = self._written
        all_features[place, :depths] = features
        for column, each in enumerate((self._plain, self.learnt)):
            expected[column, place, :depths] = chance(each, features)
        foretold[place] = expected[int(self.applied), place]
        all_known[place] = False
        all_known[place, :depths] = known
        all_accepted[place] = accepted.numpy()[rows]
        self.seen += int(known.sum())
        self._count += len(rows)
        self._since += len(rows)
        self._steps += 1
        early = self._count < WINDOW
        if self._since >= min(FIT_EVERY, max(FIRST_FIT, self._count // 4)) and (early or self._steps >= STEPS):
            self._fit()
        return rows

    def lost(self, drafts: int) -> Tensor:
        """(drafts,) nats of the outcome of each of the newest ones, as it was foretold; no more of them than are in the
        window."""
        newest = (self._count - drafts + torch.arange(drafts)) % WINDOW
        return torch.where(self._known, nll(self._foretold, self._hits()), 0.0).sum(1)[newest]

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

    def window(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the drafts that are remembered: (drafts, d_max) bool, which tokens were verified, and accepted; and (2,
        drafts, d_max) what was expected of them, by the classifier and by what was learnt until then."""
        size = min(self._count, WINDOW)
        return self._known[:size], self._hits()[:size], self._expected[:, :size]

    def _hits(self) -> Tensor:
        return torch.arange(self._known.shape[1]) < self._accepted[:, None]

    def _fit(self) -> None:
        size = min(self._count, WINDOW)
        new = min(self._since, size)
        self._since = self._steps = 0
        self.fits += 1
        # of drafts that came after each: the fit before on the newest, the classifier on the whole window
        reached, hit = self._reached(), self._hits()
        newest = self._believed(new, reached, hit)
        now, before = (self._losses(each, reached[newest], hit[newest], newest) for each in (self.learnt, self._before))
        plain, used = (torch.where(self._known, nll(each, hit), 0.0).sum(1)[:size] for each in self._expected)
        self._proven = _worse(plain - used)
        turned = now - self._losses(self._plain, reached[newest], hit[newest], newest)
        if self.learnt is not self._plain and _worse(used - plain):
            # nor does what an earlier server learnt hold here
            self.learnt = self._before = self._plain
            self.discarded += 1
        elif _worse(now - before):
            self.learnt = self._before
            self.discarded += 1
        elif self.learnt is not self._plain and new >= FIT_EVERY and _worse(turned):
            # the traffic is another, long before the window says so
            self.learnt = self._before = self._plain
            self.discarded, self.turns = self.discarded + 1, self.turns + 1
        else:
            self._before = self.learnt
            sure = forgotten(self.learnt, new)
            self.learnt = fitted(self.learnt, sure, self._features[newest], reached[newest], hit[newest], self.seen)

    def _believed(self, new: int, reached: Tensor, hit: Tensor) -> Tensor:
        """Places of those of so many newest drafts that are learnt from: all, where nobody knows whose they are."""
        drafts = min(max(new, NEWEST), self._count, WINDOW)
        places = (self._count - drafts + torch.arange(drafts)) % WINDOW
        owners = list(self._entered)[-drafts:]
        if len(owners) < drafts:
            return places[-new:]
        likely = torch.sigmoid(self.learnt.logits(self._features[places]))
        self.contrary = contrary(owners, *(each.numpy() for each in (likely, hit[places], reached[places])))
        taken = torch.tensor([owner not in self.contrary for owner in owners[-new:]])
        return places[-new:][taken]

    def _reached(self) -> Tensor:
        """(WINDOW, d_max) bool: of each draft the tokens down to the first that was refused."""
        return self._known & (torch.arange(self._known.shape[1]) <= self._accepted[:, None])

    def _losses(self, learnt: Learnt, reached: Tensor, hit: Tensor, rows: Tensor) -> Tensor:
        """(rows,) nats of each draft's outcome."""
        loss = nll(torch.sigmoid(learnt.logits(self._features[rows])), hit)
        return torch.where(reached, loss, 0.0).sum(1)


def _worse(more: Tensor) -> bool:
    """Whether what was lost more is more than chance."""
    return float(more.mean()) > DOUBT * float(more.std()) / len(more) ** 0.5
