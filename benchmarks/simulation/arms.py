"""The contestants of the simulation: each with the drafts it replays, what it knows of them and what it pays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.report.tables import AUTO
from benchmarks.simulation.roofline import Machine, Measured, Model
from benchmarks.simulation.steps import Arm, fixed_beta, plain, planned, static
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.rivals import OnlineLogistic, joint_prob
from c2t_plugin.lab.sweeps import eagle2_sweep, kept_nodes, truncate
from c2t_plugin.lab.trees import Forest
from c2t_plugin.planner import CostCurve
from c2t_plugin.traces.file import Traces

STATIC = (1, 2, 4, 6)
THRESHOLDS = (0.1, 0.3, 0.5)
BETAS = (0.3, 0.5, 0.7)
TREE_NODES = 60
TREE_BETAS = (0.1, 0.3)


@dataclass(frozen=True)
class Entrant:
    """name: in tables. arm: how it chooses. curve: what it pays. acceptance: (states, depth) what it is told of each
    recorded chain. hits: (states,) int64 draft tokens accepted if all are verified. tokens: that its largest step may
    verify, roots included. width: tokens of a request that a draft pass reads, 0 without a draft."""

    name: str
    arm: Arm
    curve: CostCurve
    acceptance: Tensor
    hits: Tensor
    tokens: int
    width: int = 1


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


class SglangAdaptive:
    """`--speculative-adaptive` of SGLang 0.5.23 with its own table: a running mean of the batch's accept length moves
    the draft length along the steps allowed at that batch size; from 0 steps on it tries the next one now and then."""

    # requests from which on: steps allowed, hysteresis on the way down
    TABLE = ((64, (0,), 0.0), (32, (0, 1), 0.0), (8, (0, 1, 3), 0.0), (1, (1, 3, 5, 7), -0.25))
    WEIGHT, WARM_UP, INTERVAL = 0.2, 10, 5

    def __init__(self, initial: int) -> None:
        self._slots = {
            least: _AdaptiveSlot(steps, initial if initial in steps else steps[len(steps) // 2], down)
            for least, steps, down in self.TABLE
        }
        self._now = self._slots[1]

    @classmethod
    def tokens(cls, requests: int) -> int:
        """The most that a step of up to so many requests verifies, roots included: fewer requests have longer
        chains."""
        longest = {n: next(steps[-1] for least, steps, _ in cls.TABLE if n >= least) for n in range(1, requests + 1)}
        return max(n * (1 + length) for n, length in longest.items())

    def depth(self, requests: int) -> int:
        self._now = next(self._slots[least] for least, _, _ in self.TABLE if requests >= least)
        return self._now.steps[self._now.at]

    def keep(self, outcome: Tensor) -> Tensor:
        """outcome: (requests, drafted) 1 where the target accepts; read only after all of them count as verified."""
        self._now.update(float(outcome.sum(1).mean()) if outcome.numel() else None)
        return torch.full((len(outcome),), outcome.shape[1])


class _AdaptiveSlot:
    def __init__(self, steps: tuple[int, ...], initial: int, down: float) -> None:
        self.steps, self.at, self.down = steps, steps.index(initial), down
        self.mean, self.batches = float(initial - 1), 0

    def update(self, accepted: float | None) -> None:
        if accepted is not None:
            self.mean += SglangAdaptive.WEIGHT * (accepted - self.mean)
        self.batches += 1
        since = self.batches - SglangAdaptive.WARM_UP
        if since > 0 and since % SglangAdaptive.INTERVAL == 0:
            self._move()

    def _move(self) -> None:
        if self.steps[self.at] == 0:
            self.at = min(1, len(self.steps) - 1)
            if self.mean < 0 < self.steps[self.at]:
                self.mean = float(self.steps[self.at] - 1)
            return
        before = self.at
        while self.at and self.mean <= max(self.steps[self.at - 1] - 0.5, 0.5) + self.down:
            self.at -= 1
        if self.at == before:
            while self.at + 1 < len(self.steps) and self.mean > self.steps[self.at] - 0.5:
                self.at += 1


def chain_arms(
    traces: Traces,
    classifier: NodeClassifier,
    setting: Setting,
    estimator: OnlineLogistic | None,
    calibrated: NodeClassifier | None = None,
) -> Iterator[Entrant]:
    """Plain decoding and everything that drafts chains. estimator: of vLLM's adaptive verification, None to leave it
    out. calibrated: what the planner goes by, None for the classifier."""
    outcome = traces.chain.accepted.int().cumprod(1)
    hits, certain = outcome.sum(1), torch.ones_like(traces.chain.joint_log_prob)
    alone = setting.machine.curve(setting.target, None, setting.requests)
    yield Entrant("plain", plain(), alone, certain, hits, setting.tokens(0), width=0)
    unscored, scored = setting.curve(), setting.curve(scored=True)
    longest = setting.tokens(setting.d_max)
    for length in STATIC:
        yield Entrant(f"static {length}", static(length), unscored, certain, hits, setting.tokens(length))
    adaptive = SglangAdaptive(initial=3)
    arm = Arm("adaptive", adaptive.depth, adaptive.keep)
    yield Entrant("SGLang adaptive", arm, unscored, outcome.float(), hits, adaptive.tokens(setting.requests))
    joint = joint_prob(traces.chain).exp()
    for least in THRESHOLDS:
        yield Entrant(f"P >= {least:g}", fixed_beta(least, setting.d_max), scored, joint, hits, longest)
    confidence = classifier.confidence(traces.chain.stats())
    for beta in BETAS:
        yield Entrant(f"C2T beta {beta:g}", fixed_beta(beta, setting.d_max), scored, confidence, hits, longest)
    if estimator is not None:
        survival = estimator.survival(traces.chain).exp()
        yield Entrant("planned, vLLM's estimator", planned(scored, setting.d_max), scored, survival, hits, longest)
    if calibrated is not None:
        confidence = calibrated.confidence(traces.chain.stats())
    yield Entrant(AUTO, planned(scored, setting.d_max), scored, confidence, hits, longest)


def tree_arms(traces: Traces, classifier: NodeClassifier, setting: Setting) -> Iterator[Entrant]:
    """EAGLE-2's tree and C2T's, d_max deep. A record that ends before a tree does leaves its tau a little too small."""
    forest = truncate(traces.tree, min(setting.d_max, traces.tree.layers))
    nodes = min(TREE_NODES, forest.accepted.shape[1])
    hits = eagle2_sweep(forest).tau[nodes - 1].long()
    yield _tree(f"EAGLE-2 tree of {nodes}", torch.full_like(hits, nodes), hits, forest, setting, scored=False)
    confidence = classifier.confidence(forest.stats())
    for beta in TREE_BETAS:
        kept = kept_nodes(forest, confidence, beta, forest.k)
        hits = (kept & forest.accepted).sum(1)
        yield _tree(f"C2T tree, beta {beta:g}", kept.sum(1), hits, forest, setting, scored=True)


def _tree(name: str, kept: Tensor, hits: Tensor, forest: Forest, setting: Setting, scored: bool) -> Entrant:
    width, passes = forest.k, forest.layers
    arm = Arm(name, lambda requests: passes, lambda table: table[:, 0].long())
    table = kept.float()[:, None].expand(-1, passes)
    return Entrant(name, arm, setting.curve(scored, width), table, hits, setting.tokens(int(kept.max())), width)


def requests_of(traces: Traces, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Requests with outputs of these lengths, each from the first state of a recorded prompt on, and on into the next
    prompts where it is longer than the record: rows and the number of the request, (sum of lengths,) int64 both."""
    starts = (torch.diff(traces.prompt.long(), prepend=torch.tensor([-1])) != 0).nonzero().flatten()
    rows = [(starts[i % len(starts)] + torch.arange(n)) % len(traces) for i, n in enumerate(lengths)]
    return torch.cat(rows), torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def replayed(traces: Traces, hits: Tensor, rows: Tensor, request: Tensor) -> Traces:
    """The traces that `lab.simulate.serve` walks through: only how much of each chain is accepted matters to it."""
    layers = traces.chain.layers
    chain = replace(traces.chain, accepted=torch.arange(layers) < hits[:, None])[rows]
    steps = torch.cat([torch.arange(int(n)) for n in request.unique_consecutive(return_counts=True)[1]])
    return Traces(chain, chain, request.int(), steps.short(), traces.novel[rows], header=traces.header)
