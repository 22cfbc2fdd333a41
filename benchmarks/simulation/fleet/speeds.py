"""How fast a replica decodes by its requests: from published rows of the simulation of one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.report.rows import BenchRow
from benchmarks.report.tables import SPEED, latest_blocks, load_of
from benchmarks.simulation.roofline import BYTES, Machine, Model
from c2t_plugin.errors import C2TError

PLAIN = "plain"


@dataclass(frozen=True)
class Speeds:
    """Of one arm. rates: (slots + 1,) tokens per second that each request gets while so many decode; 0 of none.
    draft: whether a prompt is read by a draft too. tau: accepted draft tokens per verify step, at those loads."""

    rates: Sequence[float]
    draft: bool
    tau: Sequence[float]

    @property
    def slots(self) -> int:
        return len(self.rates) - 1


@dataclass(frozen=True)
class Reading:
    """What a prompt costs: target and draft on a machine."""

    machine: Machine
    target: Model
    draft: Model

    def prefill_s(self, tokens: int, drafted: bool) -> float:
        """Seconds of one pass over so many tokens, of the draft too where there is one, and the host's."""
        if not tokens:
            return self.machine.assumed.host
        seconds = self.machine.pass_s(self.target, tokens, 1) + self.machine.assumed.host
        return seconds + self.machine.pass_s(self.draft.of_features, tokens, 1) * drafted

    def transfer_s(self, tokens: int) -> float:
        """Seconds until the keys and values of so many tokens are on another server, over one GPU's link."""
        return tokens * self.target.cache_per_token / self.machine.gpu.link

    def cached_tokens(self, requests: int) -> int:
        """Tokens of prefixes that have place beside both models and so many requests."""
        models = (self.target, self.draft.of_features)
        weights = sum(each.weights + each.hidden * each.vocab for each in models) * BYTES
        per_token = sum(each.cache_per_token for each in models)
        left = self.machine.gpu.memory * self.machine.tp - weights
        return max(0, int(left / per_token) - requests * self.machine.assumed.context)


def speeds_of(rows: Sequence[BenchRow], wanted: Mapping[str, str | int]) -> dict[str, Speeds]:
    """Every arm of the setting that was simulated from one request on, to the largest load that they all have.

    wanted: of the setting: gpu, tp, target, draft, context. C2TError if there is no such setting.
    """
    blocks = latest_blocks(row for row in rows if row.scenario == "simulated" and not row.error)
    found = next((each for each in blocks.values() if _is(each[0], wanted)), None)
    if found is None:
        raise C2TError(f"no simulated rows of {dict(wanted)}; `python -m benchmarks.simulation` makes them")
    loads = {arm: sorted(load_of(row) for row in found if row.arm == arm) for arm in {row.arm for row in found}}
    most = loads[PLAIN][-1]
    whole = [arm for arm, each in loads.items() if each[0] == 1 and each[-1] == most]
    return {arm: _interpolated([row for row in found if row.arm == arm], most) for arm in sorted(whole)}


def _is(row: BenchRow, wanted: Mapping[str, str | int]) -> bool:
    return all(row.setting.get(name) == value for name, value in wanted.items())


def _interpolated(rows: Sequence[BenchRow], slots: int) -> Speeds:
    """Seconds per token of a request grow about linearly with the requests, so these are what is interpolated."""
    ordered = sorted(rows, key=load_of)
    loads = [load_of(row) for row in ordered]
    seconds = [load / (row.metrics[SPEED] or 0.0) for load, row in zip(loads, ordered, strict=True)]
    counts = np.arange(1, slots + 1)
    rates = 1.0 / np.interp(counts, loads, seconds)
    tau = np.interp(counts, loads, [row.metrics.get("tau") or 0.0 for row in ordered])
    return Speeds([0.0, *rates.tolist()], ordered[0].arm != PLAIN, [0.0, *tau.tolist()])
