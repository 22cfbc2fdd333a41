"""Serving replayed from recorded chains under a given cost curve: what a policy's choices would bring, without a GPU.

Only the decisions and the acceptance are real. Prefill, scheduling and everything else that a cost curve leaves out
are not simulated, so the figures compare policies and predict no server.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from c2t_kernels import early_stop
from c2t_plugin.planner import CostCurve, Planner, draft_passes, spend, switched_depths
from c2t_plugin.planner.ahead import DraftEnd, Prices
from c2t_plugin.traces.file import Traces


@dataclass(frozen=True)
class Policy:
    """How a server chooses. depth: requests -> depth of the drafts. keep: (requests, drafted) acceptance
    probabilities -> (requests,) int64 draft tokens to verify. goes_on: (requests, drafted so far) of them -> whether
    one more is drafted; None: as many as `depth` says. tree: whether drafts are trees, of which `keep` is told all
    nodes, in the order in which they are verified."""

    name: str
    depth: Callable[[int], int]
    keep: Callable[[Tensor], Tensor]
    goes_on: Callable[[Tensor], bool] | None = None
    tree: bool = False

    def draft(self, acceptance: Tensor) -> tuple[Tensor, int]:
        """What `keep` is told of a step, and how deep that drafts. acceptance: (requests, tokens) that may be."""
        depth = self.depth(len(acceptance))
        if self.tree:
            return acceptance, depth
        depth = self._ended(acceptance[:, :depth])
        return acceptance[:, :depth], depth

    def _ended(self, acceptance: Tensor) -> int:
        """How many tokens of each chain are drafted. acceptance: (requests, depth) of those that may be."""
        whole = acceptance.shape[1]
        if self.goes_on is None:
            return whole
        return next((n for n in range(1, whole) if not self.goes_on(acceptance[:, :n])), whole)


def plain() -> Policy:
    """No draft."""
    return Policy("plain", lambda requests: 0, lambda acceptance: torch.zeros(len(acceptance), dtype=torch.int64))


def static(length: int) -> Policy:
    """Chains of one length, all verified."""
    return Policy(f"static {length}", lambda requests: length, lambda a: torch.full((len(a),), a.shape[1]))


def fixed_beta(beta: float, d_max: int) -> Policy:
    """The paper's chain mode: each chain ends before its first token below beta (C2T v1 5.5)."""
    return Policy(f"beta {beta:g}", lambda requests: d_max, lambda a: early_stop(a, beta, a.shape[1]).long())


def planned(curve: CostCurve, d_max: int, **tuning: Any) -> Policy:
    """The planner as SGLang runs it, which knows the cost curve. tuning: probe_every and forget, where not its own."""
    planner = Planner(curve, d_max, depths=switched_depths(d_max), **tuning)
    return Policy("planned", planner.depth, planner.keep)


def ending(curve: CostCurve, d_max: int) -> Policy:
    """The same where a draft can end between two passes, as on a CPU."""
    planner, end = Planner(curve, d_max, depths=switched_depths(d_max)), DraftEnd()

    def depth(requests: int) -> int:
        return d_max if planner.depth(requests) else 0

    def goes_on(acceptance: Tensor) -> bool:
        if acceptance.shape[1] == 1:
            end.begin(Prices.of(planner, len(acceptance)))
        return end.goes_on(acceptance[:, -1].tolist(), [math.nan] * len(acceptance))

    return Policy("planned, drafts end", depth, planner.keep, goes_on)


def whole_tree(depth: int) -> Policy:
    """Trees all of whose nodes are verified, as the numbers that it is told say how many there are: (requests, 1)."""
    return Policy("whole trees", lambda requests: depth, lambda nodes: nodes[:, 0].long(), tree=True)


def planned_tree(curve: CostCurve, depth: int) -> Policy:
    """C2T's planner over trees: one budget of the target's pass, spent on all requests' likeliest nodes."""

    def keep(chances: Tensor) -> Tensor:
        return spend(chances, curve, draft_passes(depth)).kept

    return Policy("planned trees", lambda requests: depth, keep, tree=True)


@dataclass(frozen=True)
class Simulated:
    """seconds: simulated. tokens: output, bonus tokens included. steps: decoding steps of the batch. tau: accepted
    draft tokens per request and step, bonus excluded. gamma: draft tokens verified per request and step. requests: mean
    number of requests per step."""

    seconds: float
    tokens: int
    steps: int
    tau: float
    gamma: float
    requests: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Taken(NamedTuple):
    """What one step came to. kept, accepted: (requests,) int64 draft tokens of each. seconds: simulated."""

    kept: Tensor
    accepted: Tensor
    seconds: float


# A step of the requests at these states, (requests,) int64.
StepOf = Callable[[Tensor], Taken]


def steps_of(policy: Policy, acceptance: Tensor, accepted: Tensor, curve: CostCurve) -> StepOf:
    """Steps in which `policy` chooses. In each the draft keeps up, which gives its first token. acceptance, accepted:
    see `serve`."""
    hits = F.pad(accepted.int().cumsum(1), (1, 0))

    def step(at: Tensor) -> Taken:
        requests = len(at)
        told, drafted = policy.draft(acceptance[at])
        kept = policy.keep(told)
        drafting = draft_passes(drafted) * curve.draft_s(requests) + curve.draft_extend
        verifying = float(curve.verify_s(torch.tensor(requests + int(kept.sum()))))
        return Taken(kept, hits[at, kept], verifying + drafting + curve.fixed)

    return step


def serve(
    traces: Traces,
    acceptance: Tensor,
    curve: CostCurve,
    policy: Policy,
    slots: int,
    accepted: Tensor | None = None,
) -> Simulated:
    """`walk` with the steps of a policy.

    acceptance: (states, tokens) what the policy is told of each state's draft tokens, in the order in which they are
    verified. accepted: (states, tokens) bool, which of them the target accepts in that order; None: the recorded
    chains'.
    """
    accepted = traces.chain.accepted.int().cumprod(1) if accepted is None else accepted.int()
    return walk(traces, steps_of(policy, acceptance, accepted, curve), slots)


def walk(traces: Traces, step_of: StepOf, slots: int) -> Simulated:
    """All recorded prompts, each token of them a state, through `slots` places; a new prompt takes each place that
    falls free."""
    first = traces.first
    end = torch.cat([first[1:], torch.tensor([len(traces)])])
    at, until, waiting = first[:slots].clone(), end[:slots].clone(), slots
    seconds, tokens, steps, verified, accepted_in_all, turns = 0.0, 0, 0, 0, 0, 0
    while len(at):
        kept, taken, took = step_of(at)
        seconds += took
        tokens += int(torch.minimum(taken + 1, until - at).sum())
        steps, turns = steps + 1, turns + len(at)
        verified, accepted_in_all = verified + int(kept.sum()), accepted_in_all + int(taken.sum())
        at = at + taken + 1
        running = at < until
        free = int((~running).sum())
        fresh = slice(waiting, waiting + free)
        at, until = torch.cat([at[running], first[fresh]]), torch.cat([until[running], end[fresh]])
        waiting += free
    return Simulated(seconds, tokens, steps, accepted_in_all / turns, verified / turns, turns / steps)
