"""How deep to draft and how many draft tokens to verify, so that output tokens per second are most.

A fixed beta answers neither question: what a candidate costs depends on the machine and on how many requests share a
step. With acceptance probabilities and a cost curve both have an answer, and plain decoding is one of them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from c2t_plugin.errors import ConfigError

FORMAT = "c2t-cost-curve"
# Steps between two looks at what one more draft token would bring.
PROBE_EVERY = 64
# Weight of the newest step in the running means of acceptance by depth.
FORGET = 0.1


def draft_passes(depth: int) -> int:
    """Of a step that drafts so deep, besides the one that lets the draft keep up: that predicts the first token."""
    return max(0, depth - 1)


def switched_depths(d_max: int) -> tuple[int, ...]:
    """0 to d_max, rising: each has CUDA graphs of its own in an engine, so few of those between."""
    return tuple(sorted({0, d_max, *(2**i for i in range(d_max.bit_length()) if 2**i < d_max)}))


@dataclass(frozen=True)
class CostCurve:
    """Seconds of the parts of one decoding step on one machine.

    verify: (tokens, seconds) of the target's forward pass over so many tokens in all, roots included; at least two
    points. draft: (requests, seconds) of one draft forward pass. fixed: seconds of a step that depend on neither.
    keep_up: seconds that a step costs for the draft to read what was accepted, without which it cannot draft later;
    spent in plain decoding too.

    Points are joined by straight lines, and continued by the last one. A point below an earlier one is taken at its
    height: a larger pass that measured faster is noise, and would make the planner verify tokens for nothing.
    """

    verify: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, float], ...]
    fixed: float = 0.0
    keep_up: float = 0.0

    def __post_init__(self) -> None:
        for name in ("verify", "draft"):
            points = getattr(self, name)
            counts = [count for count, _ in points]
            if len(points) < 2 or counts != sorted(set(counts)) or counts[0] < 1:
                raise ConfigError(
                    f"cost curve: {name} needs two or more points of rising counts from 1 on, got {counts}"
                )
            if not all(math.isfinite(seconds) and seconds > 0 for _, seconds in points):
                raise ConfigError(
                    f"cost curve: every time of {name} must be a positive number of seconds, got {points}"
                )
        if not all(math.isfinite(value) and value >= 0 for value in (self.fixed, self.keep_up)):
            raise ConfigError(f"cost curve: fixed and keep_up must be 0 or more, got {self.fixed} and {self.keep_up}")

    def verify_s(self, tokens: Tensor) -> Tensor:
        """Seconds of target passes over `tokens` tokens: any shape, any number type -> float64."""
        return _interpolate(self.verify, tokens)

    def draft_s(self, requests: int) -> float:
        """Seconds of one draft pass for so many requests."""
        return _interpolated(self.draft, requests)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        record = {"format": FORMAT, "verify": self.verify, "draft": self.draft}
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(json.dumps({**record, "fixed": self.fixed, "keep_up": self.keep_up}, indent=1) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> CostCurve:
        """Read what `save` wrote. Raises ConfigError if the file is missing or is not a cost curve."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path} is no readable cost curve: {error}") from error
        names = {"format", "verify", "draft", "fixed", "keep_up"}
        if not isinstance(found, Mapping) or set(found) != names or found["format"] != FORMAT:
            raise ConfigError(
                f"{path} is no cost curve: it needs exactly {', '.join(sorted(names))}, format {FORMAT!r}"
            )
        try:
            points = {name: tuple((int(count), float(s)) for count, s in found[name]) for name in ("verify", "draft")}
            return cls(**points, fixed=float(found["fixed"]), keep_up=float(found["keep_up"]))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no cost curve: {error}") from error


# Asked for several times a step, on the way of the next launch.
@functools.lru_cache(maxsize=16)
def _table(points: tuple[tuple[int, float], ...]) -> tuple[Tensor, Tensor]:
    counts = torch.tensor([count for count, _ in points], dtype=torch.float64)
    return counts, torch.tensor([s for _, s in points], dtype=torch.float64).cummax(0).values


@functools.lru_cache(maxsize=1024)
def _interpolated(points: tuple[tuple[int, float], ...], at: int) -> float:
    return float(_interpolate(points, torch.tensor(at)))


def _interpolate(points: tuple[tuple[int, float], ...], at: Tensor) -> Tensor:
    counts, seconds = _table(points)
    x = at.double()
    right = torch.searchsorted(counts, x).clamp(1, len(points) - 1)
    left = right - 1
    slope = (seconds[right] - seconds[left]) / (counts[right] - counts[left])
    # below the first point a pass costs what the first one does: weights have to be read anyway
    return torch.where(x < counts[0], seconds[0], seconds[left] + slope * (x - counts[left]))


class Budget(NamedTuple):
    """kept: (requests,) int64 draft tokens to verify of each. rate: expected output tokens per second of this step."""

    kept: Tensor
    rate: float


def spend(
    acceptance: Tensor,
    curve: CostCurve,
    drafted: int,
    longest: Tensor | None = None,
    at_least: Tensor | None = None,
    sizes: Sequence[int] = (),
) -> Budget:
    """Share the target's pass out over all requests' draft tokens.

    acceptance: (requests, depth) float, the calibrated probability that the target accepts the token *and* all before
    it; a value above an earlier one of its chain is taken at that one's height, and NaN (not known) counts as certain.
    drafted: draft passes that were run, already paid for. longest, at_least: (requests,) int64, of single requests at
    most and at least so many. sizes: rising token counts of passes that can be run, each padded to the next; beyond
    them, and without any, every count can.

    Tokens are taken by falling probability, of equal ones by lower depth and then lower row, which keeps every chain's
    kept tokens together. As many are taken as make expected output tokens (the accepted ones and one bonus token a
    request) per second most; the fewest, if several counts do.
    """
    requests, depth = acceptance.shape
    chain = acceptance.double().nan_to_num(1.0).clamp(0.0, 1.0).cummin(1).values
    depths = torch.arange(depth)
    # what has to be taken comes first
    key = chain if at_least is None else chain + 2.0 * (depths < at_least[:, None])
    if longest is not None:
        key = key.masked_fill(depths >= longest[:, None], -1.0)
    # column by column, so that a stable sort puts the lower depth first
    order = key.T.flatten().argsort(descending=True, stable=True)
    taken = key.T.flatten()[order]
    gains = chain.T.flatten()[order][taken >= 0]
    expected = requests + torch.cat([gains.new_zeros(1), gains.cumsum(0)])
    tokens = requests + torch.arange(len(gains) + 1)
    rates = expected / (
        curve.verify_s(_padded(tokens, sizes)) + drafted * curve.draft_s(requests) + curve.fixed + curve.keep_up
    )
    first = int((taken > 1.0).sum())
    count = first + int(rates[first:].argmax())
    kept = torch.bincount(order[:count] % requests, minlength=requests)
    return Budget(kept, float(rates[count]))


def _padded(tokens: Tensor, sizes: Sequence[int]) -> Tensor:
    known = torch.tensor(sizes, dtype=torch.int64)
    place = torch.searchsorted(known, tokens)
    return torch.where(place < len(known), torch.cat([known, tokens[-1:]])[place], tokens)


class Planner:
    """Chooses each step's draft depth before it drafts, and each request's kept tokens after.

    The depth comes from running means of how often a token is accepted if the one before it is, by depth; `forget` is
    the newest step's weight in them. The first step drafts as deep as it may, since a guess that is too low would be
    corrected by probes only. One step of `probe_every` drafts one depth more than seems best, so that a change for the
    better is noticed; from depth 0, plain decoding, too.
    """

    def __init__(
        self,
        curve: CostCurve,
        d_max: int,
        probe_every: int = PROBE_EVERY,
        forget: float = FORGET,
        *,
        depths: Sequence[int] | None = None,
        compact: bool = True,
    ) -> None:
        """depths: those that can be drafted, rising, from 0 to d_max; None: all. compact: whether a draft token that is
        not verified is not computed; without that all drafted ones are verified."""
        self.depths = tuple(range(d_max + 1) if depths is None else depths)
        if d_max < 1:
            raise ConfigError(f"the planner needs at least 1 draft step, got {d_max}")
        if list(self.depths) != sorted({0, d_max, *(depth for depth in self.depths if 0 < depth < d_max)}):
            raise ConfigError(f"depths must rise from 0 to {d_max}, got {self.depths}")
        if probe_every < 1 or not 0.0 < forget <= 1.0:
            raise ConfigError(f"probe_every must be at least 1 and forget in (0, 1], got {probe_every} and {forget}")
        self.curve = curve
        self.d_max = d_max
        self.probe_every = probe_every
        self.forget = forget
        self.compact = compact
        # of the token at depth i + 1, given the one before it
        self._accepted = torch.zeros(d_max, dtype=torch.float64)
        self._seen = 0
        self._short_steps = 0

    def depth(self, requests: int) -> int:
        """How deep to draft in the next step of so many requests; 0 is plain decoding."""
        if not self._seen:
            return self.d_max
        gains = self._accepted.cumprod(0).repeat_interleave(requests)
        expected = requests + torch.cat([gains.new_zeros(1), gains.cumsum(0)])
        counts = torch.arange(len(expected))
        drafted = torch.tensor(self.depths)[:, None]
        passes = torch.tensor([draft_passes(depth) for depth in self.depths])[:, None]
        seconds = self.curve.verify_s(requests + counts) + passes * self.curve.draft_s(requests)
        rates = expected / (seconds + self.curve.fixed + self.curve.keep_up)
        impossible = counts > drafted * requests if self.compact else counts != drafted * requests
        best = int(rates.masked_fill(impossible, -1.0).amax(1).argmax())
        if best == len(self.depths) - 1:
            return self.d_max
        self._short_steps += 1
        return self.depths[best + (self._short_steps % self.probe_every == 0)]

    def keep(
        self,
        acceptance: Tensor,
        longest: Tensor | None = None,
        at_least: Tensor | None = None,
        sizes: Sequence[int] = (),
    ) -> Tensor:
        """(requests,) int64 draft tokens to verify; see `spend`. acceptance: (requests, drafted) of this step."""
        drafted = acceptance.shape[1]
        if acceptance.numel():
            self._observe(acceptance.double().nan_to_num(1.0).clamp(0.0, 1.0).cummin(1).values.mean(0))
        if not self.compact:
            whole = torch.full((len(acceptance),), drafted)
            return whole if longest is None else longest.clamp(max=drafted)
        return spend(acceptance, self.curve, draft_passes(drafted), longest, at_least, sizes).kept

    def _observe(self, chain: Tensor) -> None:
        """chain: (drafted,) mean acceptance by depth."""
        drafted = len(chain)
        above = torch.cat([chain.new_ones(1), chain[:-1]])
        found = torch.where(above > 0, chain / above, 0.0)
        before = self._accepted[:drafted]
        first = torch.arange(drafted) >= self._seen
        self._accepted[:drafted] = torch.where(first, found, before + self.forget * (found - before))
        if drafted > self._seen:
            self._seen = drafted
            # what lies deeper was never seen: as likely as the deepest that was
            self._accepted[drafted:] = found[-1]
