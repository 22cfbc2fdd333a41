"""Ends of chains: hand-worked batches, properties of the reference, and the kernel against it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from c2t_kernels.stop import kernel as fused
from c2t_kernels.stop.reference import early_stop
from tests.support.kernels.strided import apart

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# The interpreter takes some 30 ms for a batch with a budget.
INTERPRETED = settings(QUIET, max_examples=20)
NAN = math.nan


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def running_minimum(row: list[float]) -> list[float]:
    smallest = math.inf
    keys = []
    for value in row:
        smallest = smallest if math.isnan(value) else min(smallest, value)
        keys.append(smallest)
    return keys


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Confidences with many equal values and NaN, a beta and a longest depth per request."""
    bs, d_max = draw(st.integers(1, max_rows)), draw(st.integers(1, 9))
    level = st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.5, 0.75, 1.0, NAN])
    confidence = draw(st.lists(st.lists(level, min_size=d_max, max_size=d_max), min_size=bs, max_size=bs))
    beta = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.6, 1.0]), min_size=bs, max_size=bs))
    depth = draw(st.lists(st.integers(0, d_max), min_size=bs, max_size=bs))
    return table(confidence), table(beta), torch.tensor(depth, dtype=torch.int32)


def test_a_chain_ends_before_its_first_token_below_beta():
    confidence = table([[0.9, 0.4, 0.9], [0.5, 0.5, 0.5], [0.1, 0.9, 0.9], [NAN, 0.6, NAN]])
    assert early_stop(confidence, 0.5, 3).tolist() == [1, 3, 0, 3]


def test_beta_and_depth_of_each_request():
    confidence = table([[0.6, 0.6, 0.6]] * 4)
    beta, depth = table([0.5, 0.6, 0.7, 0.0]), torch.tensor([3, 2, 3, 0], dtype=torch.int32)
    assert early_stop(confidence, beta, depth).tolist() == [3, 2, 0, 0]


def test_numbers_meet_confidences_on_any_device():
    # meta stands for a GPU, which a plain tensor of a number is not on either
    assert early_stop(torch.zeros(2, 3, device="meta"), 0.5, 3).device.type == "meta"


def test_budget_drops_the_tail_of_lowest_confidence():
    # running minima .9 .6 .6 and .8 .7 .7: the first row's last token is worth .6, whatever its own confidence
    confidence = table([[0.9, 0.6, 0.99], [0.8, 0.7, 0.9]])
    assert early_stop(confidence, 0.5, 3, budget=5).tolist() == [2, 3]
    assert early_stop(confidence, 0.5, 3, budget=4).tolist() == [1, 3]
    assert early_stop(confidence, 0.5, 3, budget=3).tolist() == [1, 2]
    assert early_stop(confidence, 0.5, 3, budget=0).tolist() == [0, 0]


def test_equals_fall_deepest_and_last_first():
    confidence = torch.full((3, 2), 0.7)
    shapes = [early_stop(confidence, 0.5, 2, budget=budget).tolist() for budget in range(7)]
    assert shapes == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]


@QUIET
@given(batch=batches())
def test_a_kept_length_is_the_longest_prefix_at_or_above_beta(batch: tuple[Tensor, Tensor, Tensor]):
    confidence, beta, depth = batch
    lengths = early_stop(confidence, beta, depth)
    for row, threshold, longest, length in zip(
        confidence.tolist(), beta.tolist(), depth.tolist(), lengths.tolist(), strict=True
    ):
        assert length <= longest
        assert not any(value < threshold for value in row[:length])
        assert length == longest or row[length] < threshold


@QUIET
@given(batch=batches(), budget=st.integers(0, 40))
def test_budget_is_met_exactly_and_drops_nothing_better_than_it_keeps(batch: tuple, budget: int):
    confidence = batch[0]
    free, clipped = early_stop(*batch), early_stop(*batch, budget=budget)
    assert clipped.sum() == min(int(free.sum()), budget)
    assert (clipped <= free).all()
    keys = [running_minimum(row) for row in confidence.tolist()]
    kept = [keys[i][j] for i, n in enumerate(clipped.tolist()) for j in range(n)]
    dropped = [keys[i][j] for i, n in enumerate(clipped.tolist()) for j in range(n, int(free[i]))]
    assert max(dropped, default=-1.0) <= min(kept, default=math.inf)


@INTERPRETED
@given(batch=batches(), budget=st.none() | st.integers(0, 40))
def test_kernel_equals_reference(batch: tuple, budget: int | None, device: str):
    confidence, beta, depth = (tensor.to(device) for tensor in batch)
    expected = early_stop(confidence, beta, depth, budget=budget)
    room = None if budget is None else torch.tensor([budget], dtype=torch.int32, device=device)
    for limit in (room, budget):
        found = fused.early_stop(confidence, beta, depth, budget=limit)
        assert found.dtype == torch.int32 and torch.equal(found, expected)


@INTERPRETED
@given(batch=batches(), budget=st.none() | st.integers(0, 40))
def test_both_tell_what_is_wanted_and_count_what_is_not_known(batch: tuple, budget: int | None, device: str):
    confidence, beta, depth = (tensor.to(device) for tensor in batch)
    for op in (early_stop, fused.early_stop):
        unclipped = torch.full((len(confidence),), -7, dtype=torch.int32, device=device)
        unknown = torch.full((1,), 3, dtype=torch.int64, device=device)
        found = op(confidence, beta, depth, budget=budget, unclipped=unclipped, unknown=unknown)
        assert torch.equal(found, early_stop(confidence, beta, depth, budget=budget))
        assert torch.equal(unclipped, early_stop(confidence, beta, depth))
        assert unknown.tolist() == [3 + sum(math.isnan(value) for row in confidence.tolist() for value in row)]


def test_what_is_not_known_is_counted_by_all_programs(device: str):
    confidence = torch.full((100, 6), NAN, device=device)[:, :5]
    unknown = torch.zeros(1, dtype=torch.int64, device=device)
    for times in (1, 2):
        assert fused.early_stop(confidence, 0.5, 5, unknown=unknown).tolist() == [5] * 100
        assert unknown.tolist() == [500 * times]


@pytest.mark.parametrize("budget", range(7))
def test_kernel_breaks_ties_as_the_reference(budget: int, device: str):
    confidence = torch.full((3, 2), 0.7, device=device)
    expected = early_stop(confidence, 0.5, 2, budget=budget)
    assert torch.equal(fused.early_stop(confidence, 0.5, 2, budget=budget), expected)


# 1: one request; 257: more rows than a power of two, several programs where nothing orders the batch
@pytest.mark.parametrize("bs", [1, 257])
@pytest.mark.parametrize("budget", [None, 300], ids=["free", "budget"])
def test_kernel_on_real_valued_confidences(bs: int, budget: int | None, device: str):
    confidence = torch.rand(bs, 16, generator=torch.Generator().manual_seed(bs)).sqrt().to(device)
    expected = early_stop(confidence, 0.5, 14, budget=budget)
    assert torch.equal(fused.early_stop(confidence, 0.5, 14, budget=budget), expected)
    assert bs == 1 or budget is None or expected.sum() == budget


def test_kernel_reads_strided_rows(device: str):
    confidence = torch.rand(5, 12, generator=torch.Generator().manual_seed(0)).to(device)
    found = fused.early_stop(confidence[:, 3:7], 0.4, 4)
    assert torch.equal(found, early_stop(confidence[:, 3:7], 0.4, 4))


@pytest.mark.parametrize("bs", [1, 40])
@pytest.mark.parametrize("budget", [None, 25], ids=["free", "budget"])
def test_links_are_taken_out_behind_what_is_kept(bs: int, budget: int | None, device: str):
    confidence = torch.rand(bs, 3, generator=torch.Generator().manual_seed(bs)).sqrt().to(device)
    # rows that lie apart, with more columns than a chain has nodes
    both = [torch.arange(bs * 9, device=device).view(bs, 9) for _ in range(2)]
    mine, theirs = (each[:, 2:7] for each in both)
    expected = early_stop(confidence, 0.6, 3, budget=budget, links=theirs)
    assert torch.equal(fused.early_stop(confidence, 0.6, 3, budget=budget, links=mine), expected)
    assert torch.equal(*both)
    cut = (both[0] == -1).nonzero()
    assert cut[:, 0].tolist() == list(range(bs)) and (cut[:, 1] - 2).tolist() == expected.tolist()


def test_limits_of_requests_may_lie_apart(device: str):
    confidence = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)).to(device)
    beta = torch.linspace(0.2, 0.8, 5).to(device)
    longest = torch.tensor([6, 1, 5, 0, 3], dtype=torch.int32, device=device)
    found = fused.early_stop(apart(confidence), apart(beta), apart(longest))
    assert torch.equal(found, early_stop(confidence, beta, longest))


def test_an_empty_batch_is_no_error(device: str):
    assert fused.early_stop(torch.zeros(0, 4, device=device), 0.5, 4).shape == (0,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"confidence": torch.zeros(2, 3, dtype=torch.float64)}, TypeError, "confidence"),
        ({"confidence": torch.zeros(3)}, ValueError, "confidence"),
        ({"confidence": torch.zeros(3, 2).T}, ValueError, "confidence"),
        ({"confidence": torch.zeros(2, 0)}, ValueError, "confidence"),
        ({"beta": math.nan}, ValueError, "beta"),
        ({"beta": torch.zeros(3)}, ValueError, "beta"),
        ({"max_depth": torch.zeros(2)}, TypeError, "max_depth"),
        ({"max_depth": -1}, ValueError, "max_depth"),
        ({"budget": torch.zeros(2, dtype=torch.int32)}, ValueError, "budget"),
        ({"budget": -1}, ValueError, "budget"),
        ({"budget": 2**31}, ValueError, "budget"),
        ({"unclipped": torch.zeros(3, dtype=torch.int32)}, ValueError, "unclipped"),
        ({"unclipped": torch.zeros(2)}, TypeError, "unclipped"),
        ({"unknown": torch.zeros(1, dtype=torch.int32)}, TypeError, "unknown"),
        ({"unknown": torch.zeros(2, dtype=torch.int64)}, ValueError, "unknown"),
        ({"links": torch.zeros(2, 4)}, TypeError, "links"),
        ({"links": torch.zeros(3, 4, dtype=torch.int64)}, ValueError, "links"),
        ({"links": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, "columns of links must be at least 4"),
        ({"confidence": torch.zeros(1025, 5), "budget": 3}, ValueError, "8192"),
    ],
)
def test_refuses_what_it_cannot_take(change: dict, error: type[Exception], message: str):
    arguments = {"confidence": torch.zeros(2, 3), "beta": 0.5, "max_depth": 3, **change}
    with pytest.raises(error, match=message):
        fused.early_stop(**arguments)


@pytest.mark.parametrize("op", [early_stop, fused.early_stop], ids=["reference", "fused"])
def test_equality_with_beta_keeps(op: Callable[..., Tensor], device: str):
    confidence = table([[0.4]] * 3).to(device)
    own = confidence[0, 0]
    assert op(confidence, torch.stack([own, torch.nextafter(own, own + 1), own * 0]), 1).tolist() == [1, 0, 1]


@pytest.mark.parametrize("op", [early_stop, fused.early_stop], ids=["reference", "fused"])
def test_no_confidence_is_below_a_beta_that_is_no_number(op: Callable[..., Tensor], device: str):
    confidence = table([[0.1], [0.5], [NAN]]).to(device)
    assert op(confidence, torch.full((1,), NAN, device=device), 1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("op", [early_stop, fused.early_stop], ids=["reference", "fused"])
@pytest.mark.parametrize("beta", [math.nan, math.inf, -math.inf, -0.1, 1.1])
def test_a_number_that_is_no_threshold_is_refused(op: Callable[..., Tensor], beta: float):
    with pytest.raises(ValueError, match=r"early_stop: beta must be a number in \[0, 1\]"):
        op(torch.zeros(2, 3), beta, 3)
