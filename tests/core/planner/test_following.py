"""Drafts of which the text has not told all: when it has, and what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from c2t_plugin.planner.following import Told, Untold, outcome

SURE = torch.arange(36.0).view(3, 6, 2)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), max_size=8), st.data())
def test_it_tells_what_the_whole_text_would(rest: list[int], text: list[int], data: st.DataObject):
    """However it comes, and wherever it ends."""
    untold, left, found = Untold(SURE, 1, rest, 2), list(text), None
    while left and found is None:
        size = data.draw(st.integers(0, len(left)))
        piece, left = left[:size], left[size:]
        found = untold.told(piece, ended=not left)
    if found is None:
        found = untold.told([], ended=True)
    hits = next((at for at, pair in enumerate(zip(rest, text, strict=False)) if len(set(pair)) > 1), None)
    agreed = min(len(rest), len(text)) if hits is None else hits
    # behind a token that disagrees none is accepted, whatever it is
    assert found == (2 + (agreed if hits is None else len(rest)), 2 + agreed)


@pytest.mark.parametrize(("ended", "expected"), [(False, None), (True, (3, 3))])
def test_as_long_as_the_text_agrees_and_goes_on_nothing_is_told(ended: bool, expected: tuple[int, int] | None):
    untold = Untold(SURE, 1, [7, 8], 2, at=5)
    assert untold.told([7], ended) == expected
    assert (untold.agreed, untold.rest, untold.at) == (3, [8], 6)


@pytest.mark.parametrize("rows", [[2, 0], []])
def test_outcomes_are_what_a_planner_takes(rows: list[int]):
    told: list[Told] = [(Untold(SURE, row, []), (6, row), f"request {row}") for row in rows]
    sure, known, accepted, owners = outcome(SURE, told)
    assert torch.equal(sure, SURE[rows]) and sure.shape == (len(rows), 6, 2)
    assert (known.tolist(), accepted.tolist(), owners) == ([6] * len(rows), rows, [f"request {row}" for row in rows])
