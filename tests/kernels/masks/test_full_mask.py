"""Masks over prefix and tree: one worked by hand, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from c2t_kernels.masks import kernel as fused
from c2t_kernels.masks.reference import full_mask
from c2t_kernels.tree_layout.reference import build_tree
from tests.support.kernels.forests import INTERPRETED, Trees, forests, trees


def test_full_mask_worked_by_hand():
    tree = build_tree(*trees([[-1, -1]], [[True, True]], [2]), bucket=3)
    mask, indptr = full_mask(tree.mask, torch.tensor([2]), capacity=15)
    assert indptr.tolist() == [0, 15]
    assert mask.view(3, 5).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]


@INTERPRETED
@given(forest=forests(), ragged=st.booleans(), short=st.integers(0, 9))
def test_full_mask_kernel_equals_reference(forest: tuple[Trees, int], ragged: bool, short: int, device: str):
    given_trees, bucket = forest[0].to(device), forest[1]
    prefix_lens = given_trees[4]
    tree = build_tree(*given_trees, bucket=bucket)
    counts = tree.counts if ragged else None
    needed = int(full_mask(tree.mask, prefix_lens, capacity=1, counts=counts)[1][-1])
    capacity = max(needed - short, 1)
    expected, expected_indptr = full_mask(tree.mask, prefix_lens, capacity=capacity, counts=counts)
    found, indptr = fused.full_mask(tree.mask, prefix_lens, capacity=capacity, counts=counts)
    assert torch.equal(indptr, expected_indptr) and torch.equal(found, expected)
    for i in range(len(tree.counts)):
        size = int(tree.counts[i]) if ragged else bucket
        if expected_indptr[i + 1] <= capacity:
            rows = expected[expected_indptr[i] : expected_indptr[i + 1]].view(size, -1)
            assert rows[:, : prefix_lens[i]].all()
            assert torch.equal(rows[:, prefix_lens[i] :], tree.mask[i, :size, :size])


@pytest.mark.slow
# 257 requests with one draft token or none: many programs, and a table of requests that is no power of two
def test_kernel_on_257_requests(device: str):
    many = trees([[-1]] * 257, [[i % 3 > 0] for i in range(257)], list(range(257))).to(device)
    tree = build_tree(*many, bucket=2)
    prefixes, counts = many[4] % 3, tree.counts
    # the last two elements do not fit
    capacity = int((counts * (prefixes + counts)).sum()) - 2
    expected, found = (op(tree.mask, prefixes, capacity=capacity, counts=counts) for op in (full_mask, fused.full_mask))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tree_mask": torch.zeros(2, 3, 3)}, TypeError, "tree_mask must be bool"),
        ({"tree_mask": torch.zeros(2, 3, 4, dtype=torch.bool)}, ValueError, "tree_mask must be contiguous"),
        ({"tree_mask": torch.zeros(0, 3, 3, dtype=torch.bool)}, ValueError, "requests must be between 1"),
        ({"prefix_lens": torch.zeros(2)}, TypeError, "prefix_lens must be int32 or int64"),
        ({"prefix_lens": torch.zeros(3, dtype=torch.int64)}, ValueError, "prefix_lens must have shape"),
        ({"counts": torch.zeros(2, dtype=torch.int64)}, TypeError, "counts must be int32"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
        ({"out": torch.zeros(7, dtype=torch.bool)}, ValueError, "out must have shape"),
    ],
)
def test_full_mask_refuses_what_it_cannot_take(change: dict, error: type[Exception], message: str):
    arguments = {
        "tree_mask": torch.zeros(2, 3, 3, dtype=torch.bool),
        "prefix_lens": torch.zeros(2, dtype=torch.int64),
        "capacity": 20,
        **change,
    }
    with pytest.raises(error, match=f"full_mask: {message}"):
        fused.full_mask(**arguments)
