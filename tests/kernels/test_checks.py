"""The argument checks and the test apparatus that every kernel relies on."""

from __future__ import annotations

import math

import pytest
import torch

from c2t_kernels.checks import FLOATS, check_fraction, check_int, check_tensor, output


def test_accepts_what_fits():
    rows = torch.zeros(4, 9)[:, :3]
    check_tensor("x", rows, dtype=FLOATS, shape=(None, 3), device=rows.device)
    check_tensor("x", rows.t(), contiguous_last=False)
    # a dimension of one element has no neighbours whose distance could matter
    check_tensor("x", torch.zeros(4, 9)[:, :1].t()[:, ::4])
    check_tensor("x", torch.tensor(0.5), shape=())


@pytest.mark.parametrize(
    ("tensor", "options", "error", "says"),
    [
        ([1.0], {}, TypeError, "op: x must be a tensor, got list"),
        (torch.zeros(2), {"dtype": torch.int32}, TypeError, "op: x must be int32, got float32"),
        (torch.zeros(2).double(), {"dtype": FLOATS}, TypeError, "float32 or bfloat16 or float16, got float64"),
        (torch.zeros(2, 4), {"shape": (None, 3)}, ValueError, r"shape \(any, 3\), got \(2, 4\)"),
        (torch.zeros(3), {"shape": (None, 3)}, ValueError, r"got \(3,\)"),
        (torch.zeros(2, 4).t(), {}, ValueError, r"strides \(1, 4\)"),
        (torch.zeros(2), {"device": torch.device("meta")}, ValueError, "op: x must be on meta, got cpu"),
    ],
)
def test_refuses_and_names_the_argument(tensor, options, error, says):
    with pytest.raises(error, match=says):
        check_tensor("op: x", tensor, **options)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (33, ValueError), (True, TypeError), (1.0, TypeError), (None, TypeError)]
)
def test_an_int_outside_its_bounds_is_refused(value, error):
    with pytest.raises(error, match="op: k"):
        check_int("op: k", value, 1, 32)


def test_bounds_of_an_int_count_themselves():
    for value in (1, 32):
        check_int("op: k", value, 1, 32)
    check_int("op: top_m", 10**9, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.01, 1.01])
def test_a_threshold_must_be_a_finite_fraction(value):
    with pytest.raises(ValueError, match=r"op: beta .* \[0, 1\]"):
        check_fraction("op: beta", value)


def test_fractions_include_both_ends():
    for value in (0, 1, 0.5):
        check_fraction("op: beta", value)
    with pytest.raises(TypeError, match="op: beta"):
        check_fraction("op: beta", "0.5")


def test_a_given_buffer_is_checked_and_returned():
    buffer = torch.zeros(2, 3)
    assert output("op: out", buffer, (2, 3), torch.float32, "cpu") is buffer
    for wrong in (torch.zeros(3, 3), torch.zeros(2, 4)[:, :3], torch.zeros(2, 3, device="meta")):
        with pytest.raises(ValueError, match="op: out"):
            output("op: out", wrong, (2, 3), torch.float32, "cpu")


def test_memory_is_poisoned_in_these_tests():
    assert output("op: out", None, (2, 3), torch.float32, "cpu").isnan().all()
    assert torch.empty_like(torch.zeros(2)).isnan().all()
    assert torch.zeros(2).new_empty(3).isnan().all()
    assert (torch.empty(4, dtype=torch.int32) > 2**30).all()
    assert torch.empty(1, dtype=torch.bool).all()
