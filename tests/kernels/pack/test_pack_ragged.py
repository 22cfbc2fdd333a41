"""Ragged packing: a hand-worked batch, the round trip, and the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from c2t_kernels.pack import kernel as fused
from c2t_kernels.pack.reference import pack_ragged, scatter_ragged
from tests.support.kernels.strided import apart

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# One program per request and node: the interpreter takes some 50 ms for such a batch.
INTERPRETED = settings(QUIET, max_examples=12)


def lengths(kept: list[int]) -> Tensor:
    return torch.tensor(kept, dtype=torch.int32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Kept lengths from -1 (no row) to all, distinct words, and a capacity that may be too small."""
    bs, width = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    kept = lengths(draw(st.lists(st.integers(-1, width - 1), min_size=bs, max_size=bs)))
    return kept, torch.arange(bs * width).view(bs, width) + 100, draw(st.integers(1, bs * width + 3))


def test_a_batch_worked_by_hand():
    ids = torch.arange(12).view(4, 3)
    packed = pack_ragged(lengths([1, -1, 2, 0]), [ids, -ids], capacity=8, pads=[99, 0])
    assert packed.cu_seqlens.tolist() == [0, 2, 2, 5, 6] and packed.cu_seqlens.dtype == torch.int32
    assert packed.values[0].tolist() == [0, 1, 6, 7, 8, 9, 99, 99]
    assert packed.values[1].tolist() == [0, -1, -6, -7, -8, -9, 0, 0]
    back = scatter_ragged(packed.values[0], packed.cu_seqlens, 3, fill=-1)
    assert back.tolist() == [[0, 1, -1], [-1, -1, -1], [6, 7, 8], [9, -1, -1]]


def test_what_does_not_fit_is_dropped_from_the_end():
    packed = pack_ragged(lengths([1, 2, 1]), [torch.arange(9).view(3, 3)], capacity=4, pads=[0])
    assert packed.cu_seqlens.tolist() == [0, 2, 4, 4]
    assert packed.values[0].tolist() == [0, 1, 3, 4]


def test_spare_rows_are_the_next_places_of_each_then_slots_of_nobody():
    ids = torch.arange(9).view(3, 3)
    packed = pack_ragged(lengths([0, 2, 1]), [ids], capacity=8, pads=[99], slots=4)
    assert packed.cu_seqlens.tolist() == [0, 3, 6, 8, 8]
    assert packed.values[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    # 2 beyond all windows go to the fourth slot, and no source has anything for it
    packed = pack_ragged(lengths([0, 2, 1]), [ids], capacity=11, pads=[99], slots=5)
    assert packed.cu_seqlens.tolist() == [0, 3, 6, 9, 11, 11]
    assert packed.values[0].tolist() == [*range(9), 99, 99]


@QUIET
@given(batch=batches(), more=st.integers(0, 3))
def test_filled_rows_stay_within_the_window_and_keep_what_is_kept(batch: tuple[Tensor, Tensor, int], more: int):
    kept, words, capacity = batch
    bs, width = words.shape
    packed = pack_ragged(kept, [words], capacity=capacity, pads=[-7], slots=bs + more)
    filled, plain = packed.cu_seqlens.diff(), pack_ragged(kept, [words], capacity=capacity, pads=[-7]).cu_seqlens.diff()
    assert len(filled) == bs + more and (filled <= width).all() and (filled[:bs] >= plain).all()
    assert int(filled.sum()) == min(capacity, (bs + more) * width)
    # a slot of nobody has rows only when everybody has a whole window
    assert (filled[:bs] == width).all() or not filled[bs:].any()


@QUIET
@given(batch=batches())
def test_round_trip_is_the_identity_on_what_was_packed(batch: tuple[Tensor, Tensor, int]):
    kept, words, _ = batch
    packed = pack_ragged(kept, [words], capacity=words.numel(), pads=[-7])
    back = scatter_ragged(packed.values[0], packed.cu_seqlens, words.shape[1], fill=-1)
    own = torch.arange(words.shape[1]) <= kept[:, None]
    assert torch.equal(back, torch.where(own, words, -1))
    total = int(packed.cu_seqlens[-1])
    assert total == own.sum() and (packed.values[0][total:] == -7).all()


@pytest.mark.parametrize("more", [None, 0, 2])
@INTERPRETED
@given(batch=batches())
def test_kernels_equal_reference(batch: tuple[Tensor, Tensor, int], more: int | None, device: str):
    kept, words, capacity = batch
    slots = None if more is None else len(kept) + more
    kept, words = kept.to(device), words.to(device)
    rows = words[..., None] + torch.rand(3, device=device)
    sources, pads = [words, words.int(), rows, words.float()], [0, 1, -1.5, float("-inf")]
    expected = pack_ragged(kept, sources, capacity=capacity, pads=pads, slots=slots)
    found = fused.pack_ragged(kept, sources, capacity=capacity, pads=pads, slots=slots)
    assert torch.equal(found.cu_seqlens, expected.cu_seqlens)
    assert torch.equal(found.lengths, expected.lengths) and torch.equal(found.lengths, found.cu_seqlens.diff())
    starts = expected.cu_seqlens[: len(kept) + 1]
    for ours, theirs, fill in zip(found.values, expected.values, [1, -1, 0.5, 2.0], strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        back = fused.scatter_ragged(theirs, starts, words.shape[1], fill=fill)
        assert torch.equal(back, scatter_ragged(theirs, starts, words.shape[1], fill=fill))


@pytest.mark.slow
def test_four_words_take_two_launches_and_257_requests_fit(device: str):
    generator = torch.Generator().manual_seed(0)
    kept = torch.randint(-1, 2, (257,), generator=generator, dtype=torch.int32).to(device)
    words = torch.randint(0, 1000, (257, 2), generator=generator).to(device)
    sources = [words, words + 1, words + 2, words + 3]
    # 128 rows are filled by one program of padding; 520 takes several
    expected = pack_ragged(kept, sources, capacity=520, pads=[0, 1, 2, 3])
    found = fused.pack_ragged(kept, sources, capacity=520, pads=[0, 1, 2, 3])
    assert torch.equal(found.cu_seqlens, expected.cu_seqlens)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.values, expected.values, strict=True))
    back = fused.scatter_ragged(found.values[3], found.cu_seqlens, 2, fill=-1)
    assert torch.equal(back, scatter_ragged(expected.values[3], expected.cu_seqlens, 2, fill=-1))


# 4096 is one tile, 4099 has a ragged one; half precision has its own pad conversion
@pytest.mark.parametrize(("hidden", "dtype"), [(4096, torch.bfloat16), (4099, torch.float32), (1, torch.float16)])
def test_wide_strided_rows(hidden: int, dtype: torch.dtype, device: str):
    wide = torch.randn(2, 3, hidden + 5, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    rows = wide[:, :2, 2 : hidden + 2]
    kept = lengths([0, 1]).to(device)
    expected = pack_ragged(kept, [rows], capacity=4, pads=[0.0])
    (packed,), cu_seqlens, _ = fused.pack_ragged(kept, [rows], capacity=4, pads=[0.0])
    assert torch.equal(packed, expected.values[0]) and cu_seqlens.tolist() == [0, 1, 3]
    back = fused.scatter_ragged(packed, cu_seqlens, 2, fill=0.0)
    assert torch.equal(back, scatter_ragged(packed, cu_seqlens, 2, fill=0.0))


def test_words_kept_and_packed_rows_may_lie_apart(device: str):
    kept, words = lengths([1, -1, 2]).to(device), torch.arange(9, device=device).view(3, 3)
    expected = pack_ragged(kept, [words], capacity=8, pads=[99])
    found = fused.pack_ragged(apart(kept), [apart(words)], capacity=8, pads=[99])
    assert torch.equal(found.cu_seqlens, expected.cu_seqlens) and torch.equal(found.values[0], expected.values[0])
    rows = words[..., None] * 10 + torch.arange(4, device=device)
    packed = pack_ragged(kept, [rows], capacity=8, pads=[-1]).values[0]
    back = fused.scatter_ragged(apart(packed), expected.cu_seqlens, 3, fill=-7)
    assert torch.equal(back, scatter_ragged(packed, expected.cu_seqlens, 3, fill=-7))


def test_an_empty_batch_is_all_padding(device: str):
    kept = torch.zeros(0, dtype=torch.int32, device=device)
    packed = fused.pack_ragged(kept, [torch.zeros(0, 3, dtype=torch.int64, device=device)], capacity=4, pads=[5])
    assert packed.cu_seqlens.tolist() == [0] and packed.values[0].tolist() == [5, 5, 5, 5]
    assert fused.scatter_ragged(packed.values[0], packed.cu_seqlens, 3, fill=0).shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kept": torch.zeros(2)}, TypeError, "kept"),
        ({"sources": []}, ValueError, "sources"),
        ({"sources": None}, TypeError, "pack_ragged: sources must be a sequence of tensors, got NoneType"),
        ({"sources": [None]}, TypeError, r"sources\[0\] must be a tensor, got NoneType"),
        ({"sources": [torch.zeros(3, 4)]}, ValueError, "sources"),
        ({"sources": [torch.zeros(2, 4, dtype=torch.float64)]}, TypeError, "sources"),
        ({"sources": [torch.zeros(4, 2).T]}, ValueError, "sources"),
        ({"pads": [0, 0]}, ValueError, "pads"),
        ({"capacity": 0}, ValueError, "capacity"),
    ],
)
def test_pack_refuses_what_it_cannot_take(change: dict, error: type[Exception], message: str):
    arguments = {"kept": lengths([0, 1]), "sources": [torch.zeros(2, 4)], "capacity": 8, "pads": [0], **change}
    with pytest.raises(error, match=message):
        fused.pack_ragged(**arguments)


@pytest.mark.parametrize(
    ("packed", "cu_seqlens", "width", "error"),
    [
        (torch.zeros(4, dtype=torch.float64), lengths([0, 4]), 4, TypeError),
        (torch.zeros(4), torch.zeros(2), 4, TypeError),
        (torch.zeros(4), lengths([]), 4, ValueError),
        (torch.zeros(4), lengths([0, 4]), 0, ValueError),
    ],
)
def test_scatter_refuses_what_it_cannot_take(packed: Tensor, cu_seqlens: Tensor, width: int, error: type[Exception]):
    with pytest.raises(error, match="scatter_ragged"):
        fused.scatter_ragged(packed, cu_seqlens, width, fill=0)
