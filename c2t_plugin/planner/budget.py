"""How many draft tokens of each request to verify, all requests together, by confidences and a cost curve."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.curve import LEAST_SECONDS, CostCurve
from c2t_plugin.planner.step_costs import StepCosts, near_knots


class Budget(NamedTuple):
    """kept: (requests,) int64 draft tokens to verify of each. rate: expected output tokens per second of this step.
    seconds: that it is expected to take."""

    kept: Tensor
    rate: float
    seconds: float


def spend(
    acceptance: Tensor,
    curve: CostCurve,
    drafted: int,
    longest: Tensor | None = None,
    at_least: Tensor | None = None,
    sizes: Sequence[int] = (),
    costs: StepCosts | None = None,
) -> Budget:
    """Share the target's pass out over all requests' draft tokens.

    acceptance: (requests, depth) float, the calibrated probability that the target accepts the token *and* all before
    it; a value above an earlier one of its chain is taken at that one's height, and NaN (not known) counts as certain.
    drafted: draft passes that were run, already paid for. longest, at_least: (requests,) int64, of single requests at
    most and at least so many. sizes: rising token counts of passes that can be run, each padded to the next; beyond
    them, and without any, every count can. costs: what steps turned out to cost beside the curve's passes; None: as the
    curve has it.

    Tokens are taken by falling probability, of equal ones by lower depth and then lower row, which keeps every chain's
    kept tokens together. As many are taken as make expected output tokens (the accepted ones and one bonus token a
    request) per second most; the fewest, if several counts do.
    """
    costs = costs or StepCosts(curve.beside)
    # in numpy: on so few numbers an operation of torch costs three of its
    chain = falling(acceptance).numpy()
    requests, depth = chain.shape
    depths = np.arange(depth)
    # what has to be taken comes first
    key = chain if at_least is None else chain + 2.0 * (depths < at_least.numpy()[:, None])
    if longest is not None:
        key = np.where(depths >= longest.numpy()[:, None], -1.0, key)
    # column by column, so that a stable sort puts the lower depth first
    flat = key.T.ravel()
    order = np.argsort(-flat, kind="stable")
    taken = flat[order]
    gains = chain.T.ravel()[order][taken >= 0]
    expected = requests + sums(gains)
    other = costs.scale * drafted * curve.draft_s(requests) + costs.beside(depth)
    passes = pass_seconds(curve, requests, requests * depth, tuple(sizes), costs)
    seconds = passes[: len(expected)] + other
    seconds[: requests * depth] += costs.a_cut
    # a step never costs nothing, whatever was measured beside its passes
    seconds = np.maximum(seconds, LEAST_SECONDS)
    rates = expected / seconds
    first = int(np.count_nonzero(taken > 1.0))
    count = first + int(rates[first:].argmax())
    kept = np.bincount(order[:count] % max(requests, 1), minlength=requests)
    return Budget(torch.from_numpy(kept), float(rates[count]), float(seconds[count]))


def best_rows(
    gains: Array, requests: int, curve: CostCurve, passes: float, sizes: Sequence[int], costs: StepCosts, depth: int
) -> tuple[int, float]:
    """Rows of the target's pass, roots included, that make expected output tokens per second most, where the best draft
    tokens fill what `sizes` leave; the fewest, if several do. And seconds of that step. See `spend`.

    gains: (most + 1,) accepted tokens that 0, 1, 2, ... draft tokens are expected to bring. passes: seconds of drafting
    to this depth.
    """
    most, sizes = len(gains) - 1, tuple(sizes)
    run = padded_rows(requests, most, sizes)
    expected = requests + gains[np.minimum(run - requests, most)]
    seconds = pass_seconds(curve, requests, most, sizes, costs) + (costs.scale * passes + costs.beside(depth))
    seconds[run < requests + most] += costs.a_cut
    seconds = np.maximum(seconds, LEAST_SECONDS)
    best = int((expected / seconds).argmax())
    return int(run[best]), float(seconds[best])


def falling(acceptance: Tensor) -> Tensor:
    """On the host, as float64 in [0, 1], none above one before it in its row; NaN (not known) is 1."""
    return torch.from_numpy(falling_of(acceptance.double().numpy()))


def falling_of(acceptance: Array) -> Array:
    """`falling` of (requests, depth) float64."""
    known = np.where(np.isnan(acceptance), 1.0, acceptance)
    found: Array = np.minimum.accumulate(np.minimum(np.maximum(known, 0.0), 1.0), axis=1)
    return found


def sums(values: Array) -> Array:
    """Of the first 0, 1, 2, ... values."""
    found = np.zeros(len(values) + 1, dtype=values.dtype)
    np.cumsum(values, out=found[1:])
    return found


def pass_seconds(curve: CostCurve, requests: int, most: int, sizes: tuple[int, ...], costs: StepCosts) -> Array:
    """(most + 1,) float64 seconds of target passes over the roots of so many requests and 0, 1, 2, ... draft tokens.
    sizes, costs: see `spend`."""
    passes, near = _passes(curve, requests, max(8, 1 << most.bit_length()), sizes)
    return costs.scale * passes[: most + 1] + costs.of_tokens(near[: most + 1])


# Asked for in every step, and the same as long as requests and curve are; so that drafts of all depths share it.
@functools.lru_cache(maxsize=256)
def _passes(curve: CostCurve, requests: int, most: int, sizes: tuple[int, ...]) -> tuple[Array, Array]:
    """(most + 1,) seconds by the curve, and (most + 1, knots) weights: see `near_knots`."""
    run = padded(requests + torch.arange(most + 1), sizes)
    return curve.verify_s(run).numpy(), near_knots(run.double().numpy() / requests - 1.0)


@functools.lru_cache(maxsize=256)
def padded_rows(requests: int, most: int, sizes: tuple[int, ...]) -> Array:
    """(most + 1,) int64 rows of passes over the roots of so many requests and 0, 1, 2, ... draft tokens, read-only."""
    rows: Array = padded(requests + torch.arange(most + 1), sizes).numpy()
    return rows


def padded(tokens: Tensor, sizes: Sequence[int]) -> Tensor:
    """Token counts of the passes that run so many: the next of `sizes`, rising; beyond them as they are."""
    known = torch.tensor(sizes, dtype=torch.int64)
    place = torch.searchsorted(known, tokens)
    return torch.where(place < len(known), torch.cat([known, tokens[-1:]])[place], tokens)
