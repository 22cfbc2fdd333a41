"""Spare rows of a pass: hand-worked batches, the reference against one node after another, the kernel against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from c2t_kernels.spare import kernel as fused
from c2t_kernels.spare import reference
from c2t_kernels.spare.reference import fill_spare_rows
from tests.support.kernels.strided import apart

QUIET = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
INTERPRETED = settings(QUIET, max_examples=15)
Batch = tuple[Tensor, Tensor, int, Tensor, Tensor | None]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Many equal keys, nodes that are none, of unknown confidence and trees that are full."""
    bs, columns = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    places = st.lists(st.booleans(), min_size=columns, max_size=columns)
    level = st.sampled_from([-torch.inf, 0.0, 0.125, 0.25, 0.25, 0.5, 0.5, 1.0, torch.inf])
    keep = torch.tensor(draw(st.lists(places, min_size=bs, max_size=bs)))
    key = torch.tensor([draw(st.lists(level, min_size=columns, max_size=columns)) for _ in range(bs)])
    most = int(keep.sum(1).max()) + draw(st.integers(0, 3))
    sizes = torch.tensor(sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=5))))
    own = draw(st.none() | st.lists(st.booleans(), min_size=bs, max_size=bs))
    return keep, key.float(), most, sizes, None if own is None else torch.tensor(own)


def one_after_another(keep: Tensor, key: Tensor, most: int, sizes: Tensor, own: Tensor | None) -> Tensor:
    """By the words of the operation."""
    filled, rows = keep.clone(), len(keep) + int(keep.sum())
    spare = next((size for size in sizes.tolist() if size >= rows), rows) - rows
    free = (~keep & (key > 0)).nonzero().tolist()
    for row, column in sorted(free, key=lambda place: (-float(key[tuple(place)]), *place)):
        if spare and not (own is not None and own[row]) and filled[row].sum() < most:
            filled[row, column] = True
            spare -= 1
    return filled


def test_the_surest_of_all_trees_come_first():
    keep = torch.tensor([[True, False, False], [True, False, False]])
    key = torch.tensor([[0.9, 0.3, 0.2], [0.8, 0.5, 0.4]])
    found = [fill_spare_rows(keep, key, 3, torch.tensor([rows])).tolist() for rows in (4, 5, 6, 7)]
    assert found[0] == keep.tolist()
    assert found[1] == [[True, False, False], [True, True, False]]
    assert found[2] == [[True, False, False], [True, True, True]]
    assert found[3] == [[True, True, False], [True, True, True]]


def test_a_full_tree_leaves_its_room_to_others():
    keep = torch.tensor([[True, True, False, False], [True, False, False, False]])
    key = torch.tensor([[0.9, 0.9, 0.8, 0.8], [0.5, 0.4, 0.3, 0.2]])
    found = fill_spare_rows(keep, key, 2, torch.tensor([5, 8]))
    assert torch.equal(found, keep), "a pass of 5 has no room"
    found = fill_spare_rows(keep, key, 2, torch.tensor([8]))
    assert found.tolist() == [[True, True, False, False], [True, True, False, False]]


def test_a_pass_above_the_largest_size_gets_nothing():
    keep, key = torch.tensor([[True, True, False]]), torch.tensor([[0.9, 0.8, 0.7]])
    assert torch.equal(fill_spare_rows(keep, key, 3, torch.tensor([1, 2])), keep)


def test_what_is_no_node_is_not_filled():
    keep, key = torch.zeros(1, 4, dtype=torch.bool), torch.tensor([[0.0, -torch.inf, torch.inf, 0.1]])
    assert fill_spare_rows(keep, key, 4, torch.tensor([9])).tolist() == [[False, False, True, True]]


@QUIET
@given(batch=batches())
def test_the_reference_takes_one_after_another(batch: Batch):
    assert torch.equal(fill_spare_rows(*batch), one_after_another(*batch))


@pytest.mark.slow
@INTERPRETED
@given(batch=batches())
def test_the_kernel_is_the_reference(batch: Batch, device: str):
    keep, key, most, sizes, own = (each.to(device) if isinstance(each, Tensor) else each for each in batch)
    before = keep.clone()
    found = fused.fill_spare_rows(keep, key, most, sizes, own)
    assert torch.equal(found.cpu(), fill_spare_rows(*batch)) and torch.equal(keep, before)


@pytest.mark.parametrize(("bs", "columns"), [(1, 68), (5, 68), (3, 328)])
def test_the_kernel_at_the_shapes_of_servers(bs: int, columns: int, device: str):
    generator = torch.Generator().manual_seed(columns)
    key = torch.rand(bs, columns, generator=generator)
    keep, sizes = key > 0.95, torch.tensor([11, 33, 65, 130, 257])
    found = fused.fill_spare_rows(apart(keep.to(device)), apart(key.to(device)), 59, sizes.to(device))
    assert torch.equal(found.cpu(), fill_spare_rows(keep, key, 59, sizes)) and found.sum() > keep.sum()


def test_more_places_than_a_program_orders_are_the_reference_s(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "MAX_PLACES", 32)
    asked: list[Tensor] = []

    def noting(keep: Tensor, *others: Tensor) -> Tensor:
        asked.append(keep)
        return keep

    monkeypatch.setattr(reference, "fill_spare_rows", noting)
    for bs, columns in ((4, 8), (4, 9), (5, 3)):
        keep = torch.zeros(bs, columns, dtype=torch.bool, device=device)
        fused.fill_spare_rows(keep, keep.float(), 3, torch.tensor([9], device=device))
    assert [tuple(each.shape) for each in asked] == [(4, 9), (5, 3)]


def test_no_requests_are_no_rows(device: str):
    keep = torch.zeros(0, 5, dtype=torch.bool, device=device)
    assert fused.fill_spare_rows(keep, keep.float(), 3, torch.tensor([9], device=device)).shape == (0, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given | {"keep": given["keep"].float()}, "keep must be bool"),
        (lambda given: given | {"key": given["key"][:, :2]}, r"key must have shape \(2, 3\)"),
        (lambda given: given | {"key": given["key"].double()}, "key must be float32"),
        (lambda given: given | {"sizes": given["sizes"].int()}, "sizes must be int64"),
        (lambda given: given | {"own": given["keep"][0]}, r"own must have shape \(2\)"),
    ],
)
def test_wrong_arguments_are_named(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, device: str):
    keep = torch.zeros(2, 3, dtype=torch.bool, device=device)
    given = {"keep": keep, "key": keep.float(), "sizes": torch.tensor([9], device=device)}
    with pytest.raises((TypeError, ValueError), match=f"fill_spare_rows: {message}"):
        fused.fill_spare_rows(most=3, **change(given))
