"""What the arms of a simulation share, and what each brings along."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from benchmarks.simulation.roofline import Machine, Measured, Model
from benchmarks.simulation.steps import Policy, StepOf
from c2t_plugin.planner import CostCurve


@dataclass(frozen=True)
class Entrant:
    """An arm that is replayed.

    arm: its name in the table of arms. name: in rows. policy: how it chooses. curve: what it pays.
    acceptance: (states, tokens) what it is told of each recorded draft. accepted: (states, tokens) bool, which of its
    tokens the target accepts; both in the order in which they are verified. tokens: that its largest step may verify,
    roots included. width: tokens of a request that a draft pass reads, 0 without a draft. step: what the arm does,
    where it drafts in several shapes, in the place of what its policy says.
    """

    arm: str
    name: str
    policy: Policy
    curve: CostCurve
    acceptance: Tensor
    accepted: Tensor
    tokens: int
    width: int = 1
    step: StepOf | None = None


@dataclass(frozen=True)
class Setting:
    """What all arms share: the machine, both models, requests in flight, and the longest chain."""

    machine: Machine | Measured
    target: Model
    draft: Model
    requests: int
    d_max: int

    def curve(self, scored: bool = False, width: int = 1) -> CostCurve:
        return self.machine.curve(self.target, self.draft, self.requests, scored, width)

    @property
    def fits(self) -> bool:
        return self.machine.fits((self.target, self.draft), self.requests)

    def tokens(self, drafted: int) -> int:
        """Tokens of a pass in which every request verifies so many draft tokens, roots included."""
        return self.requests * (1 + drafted)

    def beyond(self, entrant: Entrant) -> str:
        """Why the machine cannot price this arm's largest step, empty if it can."""
        return self.machine.beyond(entrant.tokens, self.requests * entrant.width)
