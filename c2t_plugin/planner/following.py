"""What the text tells of a draft, of its cut tokens too, as it does in traces: most of it in the step that verified the
draft, the rest where the text goes on as the draft would have."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Confidences of each draft, its tokens that are known and those accepted, and whose it is; see StepPlanner.learn.
Outcome = tuple[Tensor, Tensor, Tensor, Sequence[Hashable]]


@dataclass
class Untold:
    """A draft of which the text has not told all. sure, row: its place in the (drafts, tokens, ...) of its step, see
    StepPlanner.keep. agreed: of its tokens, those that the text goes on with. rest: others. at: their place in it."""

    sure: Tensor
    row: int
    rest: Sequence[int]
    agreed: int = 0
    at: int = 0

    def told(self, text: Sequence[int], ended: bool) -> tuple[int, int] | None:
        """Of how many of its tokens it is known whether they are accepted, all unless the text ends before, and how
        many are. None as long as more may follow. text: what has come since this was asked before. ended: whether no
        more does."""
        same = list(map(operator.eq, self.rest, text))
        hits = same.index(False) if False in same else len(same)
        self.agreed, self.rest, self.at = self.agreed + hits, self.rest[hits:], self.at + len(text)
        if False in same:
            return self.agreed + len(self.rest), self.agreed
        return None if self.rest and not ended else (self.agreed, self.agreed)


Told = tuple[Untold, tuple[int, int], Hashable]


def outcome(sure: Tensor, drafts: Sequence[Told]) -> Outcome:
    """As StepPlanner.learn takes it. sure: of the step of these drafts, each with what is `told` and whose it is."""
    known, accepted = torch.tensor([ends for _, ends, _ in drafts], dtype=torch.int64).view(-1, 2).unbind(1)
    return sure[[draft.row for draft, _, _ in drafts]], known, accepted, [owner for *_, owner in drafts]
