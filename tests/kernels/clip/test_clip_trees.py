"""Trees clipped to a pass: hand-worked batches, the reference against one node after another, the kernel against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from c2t_kernels.clip import kernel as fused
from c2t_kernels.clip import reference
from c2t_kernels.clip.reference import clip_trees
from tests.support.kernels.strided import apart

QUIET = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
INTERPRETED = settings(QUIET, max_examples=15)
Batch = tuple[Tensor, Tensor, int, int]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Many equal keys, and nodes that count for nothing."""
    bs, columns = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    places = st.lists(st.booleans(), min_size=columns, max_size=columns)
    level = st.sampled_from([-torch.inf, 0.0, 0.125, 0.25, 0.25, 0.5, 0.5, 1.0, torch.inf, torch.nan])
    keep = torch.tensor(draw(st.lists(places, min_size=bs, max_size=bs)))
    key = torch.tensor([draw(st.lists(level, min_size=columns, max_size=columns)) for _ in range(bs)])
    most = int(keep.sum(1).max()) + draw(st.integers(0, 3))
    return keep, key.float(), most, draw(st.integers(0, bs * columns + 2))


def one_after_another(keep: Tensor, key: Tensor, most: int, room: int) -> tuple[Tensor, Tensor]:
    """By the words of the operation: what is verified, and the keys."""
    clipped, surest = torch.zeros_like(keep), torch.zeros(len(keep), min(most, keep.shape[1]))
    counting = (keep & (key > 0)).nonzero().tolist()
    falling = sorted(counting, key=lambda place: (-float(key[tuple(place)]), *place))
    for row, column in falling[:room]:
        clipped[row, column] = True
    written = [0] * len(keep)
    for row, column in falling:
        surest[row, written[row]] = key[row, column]
        written[row] += 1
    return clipped, surest


def same(found: Any, expected: Any) -> bool:
    return all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))


def test_the_surest_of_all_trees_are_verified():
    keep = torch.tensor([[True, True, False], [True, True, True]])
    key = torch.tensor([[0.9, 0.3, 0.95], [0.8, 0.5, 0.4]])
    found = [clip_trees(keep, key, 3, room) for room in (0, 1, 3, 4, 9)]
    assert [each.keep.int().tolist() for each in found] == [
        [[0, 0, 0], [0, 0, 0]],
        [[1, 0, 0], [0, 0, 0]],
        [[1, 0, 0], [1, 1, 0]],
        [[1, 0, 0], [1, 1, 1]],
        [[1, 1, 0], [1, 1, 1]],
    ]
    # whatever there is room for
    assert all(each.sizes.tolist() == [2, 3] for each in found)
    assert all(torch.equal(each.surest, torch.tensor([[0.9, 0.3, 0.0], [0.8, 0.5, 0.4]])) for each in found)


@QUIET
@given(batch=batches())
def test_the_reference_takes_one_after_another(batch: Batch):
    found = clip_trees(*batch)
    assert same((found.keep, found.surest), one_after_another(*batch))
    assert found.sizes.tolist() == batch[0].sum(1).tolist()


@pytest.mark.slow
@INTERPRETED
@given(batch=batches())
def test_the_kernel_is_the_reference(batch: Batch, device: str):
    keep, key, most, room = batch
    before, moved = keep.clone(), (keep.to(device), key.to(device))
    assert same(fused.clip_trees(*moved, most, room), clip_trees(*batch)) and torch.equal(moved[0].cpu(), before)


@pytest.mark.parametrize(("bs", "columns", "room"), [(1, 68, 9), (5, 68, 100), (3, 328, 60)])
def test_the_kernel_at_the_shapes_of_servers(bs: int, columns: int, room: int, device: str):
    generator = torch.Generator().manual_seed(columns)
    key = torch.rand(bs, columns, generator=generator)
    keep = key > 0.4
    found = fused.clip_trees(apart(keep.to(device)), apart(key.to(device)), 59, room)
    assert same(found, clip_trees(keep, key, 59, room)) and found.keep.sum() == room < keep.sum()


def test_more_places_than_a_program_counts_are_the_reference_s(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "MAX_PLACES", 32)
    asked: list[Tensor] = []

    def noting(keep: Tensor, *_: Any) -> Tensor:
        asked.append(keep)
        return keep

    monkeypatch.setattr(reference, "clip_trees", noting)
    for bs, columns in ((4, 8), (4, 9), (5, 3)):
        keep = torch.zeros(bs, columns, dtype=torch.bool, device=device)
        fused.clip_trees(keep, keep.float(), 3, 9)
    assert [tuple(each.shape) for each in asked] == [(4, 9), (5, 3)]


def test_no_requests_are_no_rows(device: str):
    keep = torch.zeros(0, 5, dtype=torch.bool, device=device)
    assert [tuple(each.shape) for each in fused.clip_trees(keep, keep.float(), 3, 9)] == [(0, 5), (0,), (0, 3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given | {"keep": given["keep"].float()}, "keep must be bool"),
        (lambda given: given | {"key": given["key"][:, :2]}, r"key must have shape \(2, 3\)"),
        (lambda given: given | {"key": given["key"].double()}, "key must be float32"),
        (lambda given: given | {"most": -1}, "most must be at least 0"),
        (lambda given: given | {"room": -1}, "room must be at least 0"),
        (lambda given: given | {"room": 1.0}, "room must be an int"),
    ],
)
def test_wrong_arguments_are_named(change: Callable[[dict[str, Any]], dict[str, Any]], message: str, device: str):
    keep = torch.zeros(2, 3, dtype=torch.bool, device=device)
    with pytest.raises((TypeError, ValueError), match=f"clip_trees: {message}"):
        fused.clip_trees(**change({"keep": keep, "key": keep.float(), "most": 3, "room": 1}))
