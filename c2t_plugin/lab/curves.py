"""What a rule verifies (gamma) for what is accepted (tau, bonus token excluded) when recorded prompts are served again,
with bootstrap intervals over the sources of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.sweeps import Sweep
from c2t_plugin.traces.file import Traces

REPLICATES = 1000
LEVEL = 0.95


@dataclass(frozen=True)
class PromptSums:
    """Sums over the verifications of each prompt, (settings, prompts) float64 each."""

    settings: np.ndarray
    steps: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray

    def curve(self, weights: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """tau and gamma per verification, (settings,) each, or (replicates, settings) with weights.

        weights: (replicates, prompts), how often each prompt counts: bootstrap_weights.
        """
        if weights is None:
            weights = np.ones(self.steps.shape[1])
        steps, verified, accepted = (weights @ part.T for part in (self.steps, self.verified, self.accepted))
        return accepted / steps, verified / steps


def serve(traces: Traces, sweep: Sweep, every_state: bool = False, starts: int = 1) -> PromptSums:
    """Replay the prompts: after a verification that accepts a, the state a + 1 tokens later is the next (ChainReplay).

    starts: replay from so many of a prompt's first states and add up; one replay is a small sample of what is visited.
    every_state: instead, every recorded state counts once, also those that a server would rarely visit.
    """
    if starts < 1:
        raise C2TError(f"starts must be at least 1, got {starts}")
    first = traces.first
    end = torch.cat([first[1:], torch.tensor([len(traces)])])
    if every_state:
        parts = [torch.zeros(len(sweep.settings), len(first)).double() for _ in range(3)]
        for part, value in zip(parts, (torch.ones_like(sweep.gamma), sweep.gamma, sweep.tau), strict=True):
            part.index_add_(1, traces.owner, value.double())
    else:
        replays = [_visit(traces, sweep, first + start, end) for start in range(starts)]
        parts = [torch.stack(part).sum(0) for part in zip(*replays, strict=True)]
    return PromptSums(sweep.settings.numpy(), *(part.numpy() for part in parts))


def _visit(traces: Traces, sweep: Sweep, first: Tensor, end: Tensor) -> list[Tensor]:
    at = first.expand(len(sweep.settings), -1).clone()
    parts = [torch.zeros(at.shape).double() for _ in range(3)]
    while True:
        live = at < end
        if not live.any():
            return parts
        here = at.clamp_max(end - 1)
        hits = sweep.tau.gather(1, here).long()
        for part, value in zip(parts, (torch.ones_like(hits), sweep.gamma.gather(1, here), hits), strict=True):
            part += torch.where(live, value, 0)
        at = torch.where(live, traces.following(here, hits), at)


def gamma_at(tau: np.ndarray, gamma: np.ndarray, wanted: np.ndarray | float) -> np.ndarray:
    """gamma at the wanted tau: linear between settings, which is what alternating between two of them gives.

    tau, gamma: (settings,). A rule that verifies nothing accepts nothing; NaN above the largest tau.
    """
    taus, gammas = np.append(0.0, tau), np.append(0.0, gamma)
    order = np.lexsort((gammas, taus))
    taus, gammas = taus[order], gammas[order]
    # more tokens for no more acceptance is never chosen
    cheapest = np.minimum.accumulate(gammas[::-1])[::-1]
    return np.asarray(np.interp(wanted, taus, cheapest, right=np.nan))


def bootstrap_weights(groups: Tensor, replicates: int = REPLICATES, seed: int = 0) -> np.ndarray:
    """(replicates, prompts): how often each prompt counts when as many groups as there are are drawn with replacement.

    groups: (prompts,) int64 as Traces.groups. Prompts of one group count together: those of one file are alike.
    """
    count = int(groups.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=replicates)
    return drawn[:, groups.numpy()].astype(float)


def bootstrap_unit(traces: Traces) -> str:
    """What bootstrap_weights draws, in words."""
    return "prompts" if traces.group is None else f"their {int(traces.groups.max()) + 1} sources"


def interval(values: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of bootstrap replicates; NaN if more than a twentieth of them are, which is out of reach."""
    if np.isnan(values).mean() > 0.05:
        return float("nan"), float("nan")
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Compared:
    """gamma of a rule at each wanted tau, and its ratio to a baseline's there; (taus,) lists, intervals (low, high).

    mean: of the ratios, over the taus that both reach.
    """

    gamma: list[float]
    gamma_interval: list[tuple[float, float]]
    ratio: list[float]
    ratio_interval: list[tuple[float, float]]
    mean: float
    mean_interval: tuple[float, float]


def compare(rule: PromptSums, baseline: PromptSums, taus: Sequence[float], weights: np.ndarray) -> Compared:
    """Both at the same tau. The replicates are paired: each draws the same groups for rule and baseline."""
    wanted = np.asarray(taus)
    point = [gamma_at(*each.curve(), wanted) for each in (rule, baseline)]
    drawn = [_replicates(each, wanted, weights) for each in (rule, baseline)]
    ratio, ratios = point[0] / point[1], drawn[0] / drawn[1]
    reached = ~np.isnan(ratio)
    return Compared(
        gamma=point[0].tolist(),
        gamma_interval=[interval(column) for column in drawn[0].T],
        ratio=ratio.tolist(),
        ratio_interval=[interval(column) for column in ratios.T],
        mean=float(ratio[reached].mean()) if reached.any() else float("nan"),
        mean_interval=interval(_row_means(ratios[:, reached])) if reached.any() else (float("nan"),) * 2,
    )


def _row_means(values: np.ndarray) -> np.ndarray:
    """(rows, columns) -> (rows,): of what is there, NaN where nothing is, as a replicate that reaches no tau."""
    known = ~np.isnan(values)
    counts = known.sum(1)
    return np.divide(np.where(known, values, 0.0).sum(1), counts, out=np.full(len(values), np.nan), where=counts > 0)


def _replicates(served: PromptSums, wanted: np.ndarray, weights: np.ndarray) -> np.ndarray:
    tau, gamma = served.curve(weights)
    return np.stack([gamma_at(t, g, wanted) for t, g in zip(tau, gamma, strict=True)])
