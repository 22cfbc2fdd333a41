"""draft_stats in Triton against sums in float64 and against its twin, over the shapes and rows that could break it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from c2t_kernels.stats import DraftStats, reference
from c2t_kernels.stats import scan as stats_scan
from c2t_kernels.stats.kernel import draft_stats
from c2t_kernels.stats.workspace import DraftStatsWorkspace

# the interpreter computes with numpy, which warns of the infinities and NaN that these tests are about
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def exact(logits: torch.Tensor, top_m: int, k: int) -> DraftStats:
    """The definition in float64; equal logits in the order of their ids."""
    logits = logits.double().cpu()
    log_probs = torch.log_softmax(logits, dim=-1)
    ordered, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    entropy = torch.special.entr(ordered[:, :top_m].exp()).sum(dim=-1)
    margin = ordered[:, 0] - ordered[:, 1] if logits.shape[1] > 1 else entropy * 0
    return DraftStats(ids[:, :k], ordered[:, :k], entropy, margin)


def assert_statistics(found: DraftStats, expected: DraftStats) -> None:
    assert torch.equal(found.token_ids.cpu(), expected.token_ids)
    # The log-sum-exp is rounded to float32 (1e-6 at 20 nats) after sums whose terms carry 2 ulp of an approximate exp;
    # the entropy adds up to a thousand such terms, weighted by up to 30 nats.
    for name, tolerance in (("log_probs", 5e-6), ("margin", 5e-6), ("entropy", 1e-5)):
        value, wanted = getattr(found, name).double().cpu(), getattr(expected, name)
        torch.testing.assert_close(value, wanted, atol=tolerance, rtol=2e-6, equal_nan=True)


def rows(n: int, vocab: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype).to(device)


# 1, 2: no margin, the smallest margin; 1023-1025: around M and a power of two; 8193: two programs, groups of 2;
# 32000 and 128256: reduced and full vocabularies, 4 and 16 programs; 262208: groups of 64, as
# Gemma 3 has; 524288: the largest; M is below, at and above what is packed or finite.
@pytest.mark.parametrize(
    ("vocab", "dtype", "top_m", "k"),
    [
        (1, torch.float32, 1000, 1),
        (2, torch.float32, 1, 2),
        (1023, torch.float32, 1000, 2),
        (1024, torch.bfloat16, 1000, 5),
        (1025, torch.float16, 2, 32),
        (1025, torch.float32, 1025, 1),
        (8193, torch.float32, 5000, 3),
        (32_000, torch.bfloat16, 1000, 8),
        (128_256, torch.float32, 1000, 1),
        (128_256, torch.float16, 10**9, 1),
        pytest.param(262_144, torch.bfloat16, 1000, 32, marks=pytest.mark.slow),
        pytest.param(262_208, torch.float32, 1000, 1, marks=pytest.mark.slow),
        pytest.param(524_288, torch.bfloat16, 1000, 2, marks=pytest.mark.slow),
    ],
)
def test_matches_the_definition(vocab: int, dtype: torch.dtype, top_m: int, k: int, device: str):
    logits = rows(2, vocab, dtype, device)
    assert_statistics(draft_stats(logits, top_m, k), exact(logits, top_m, k))


def special_rows(vocab: int) -> dict[str, torch.Tensor]:
    uniform = torch.zeros(vocab)
    one_hot = torch.full((vocab,), -math.inf)
    one_hot[vocab // 2] = 3.0
    few = torch.full((vocab,), -math.inf)
    few[5::97] = torch.randn(len(few[5::97]), generator=torch.Generator().manual_seed(1))
    ties = torch.randn(vocab, generator=torch.Generator().manual_seed(2)).mul(2).round()
    zeros = torch.randn(vocab, generator=torch.Generator().manual_seed(3)).abs().neg()
    zeros[::3] = -0.0
    zeros[1::3] = 0.0
    extreme = torch.linspace(-3e38, 3e38, vocab)
    sure = torch.randn(vocab, generator=torch.Generator().manual_seed(4))
    sure[vocab - 1] = 200.0
    # all that counts lies in one place, so that few groups hold it
    clustered = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    clustered[64 : vocab // 4] += 20
    # more than M words are left, in fewer than M groups
    neighbours = torch.full((vocab,), -math.inf)
    neighbours[64:200] = torch.randn(136, generator=torch.Generator().manual_seed(6))
    return dict(
        uniform=uniform,
        one_hot=one_hot,
        few=few,
        ties=ties,
        zeros=zeros,
        extreme=extreme,
        sure=sure,
        clustered=clustered,
        neighbours=neighbours,
    )


# 300: one logit per group. 20000: groups of 4, and more equal logits than are packed.
@pytest.mark.parametrize("vocab", [300, 20_000])
@pytest.mark.parametrize("name", list(special_rows(300)))
def test_rows_that_are_normal_but_special(name: str, vocab: int, device: str):
    logits = special_rows(vocab)[name][None].to(device)
    assert_statistics(draft_stats(logits, 100, 3), exact(logits, 100, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_without_statistics_are_marked_and_leave_others_alone(bad: float, device: str, many: int):
    # only some are whole, since a whole row takes the interpreter far longer
    n = many if math.isnan(bad) else 5
    logits = torch.full((n, 40), -math.inf, device=device)
    logits[:, 17] = bad
    live = [0, n // 2, n - 2, n - 1]
    logits[live] = rows(4, 40, torch.float32, device)
    found = draft_stats(logits, 10, 2)
    assert_statistics(DraftStats(*(field[live] for field in found)), exact(logits[live], 10, 2))
    broken = torch.ones(n, dtype=torch.bool)
    broken[live] = False
    for field in found[1:]:
        assert field.cpu()[broken].isnan().all()
    assert (found.token_ids.cpu()[broken] == torch.tensor([0, 1])).all()


def test_nan_anywhere_in_a_row_of_several_programs_marks_it(device: str):
    logits = rows(2, 20_000, torch.bfloat16, device)
    logits[0, 0] = logits[1, 19_999] = math.nan
    found = draft_stats(logits, 100, 1)
    assert all(field.isnan().all() for field in found[1:])


def test_rows_of_any_stride(device: str):
    wide = rows(3, 1501, torch.bfloat16, device)
    for view in (wide[:, 1:1025], wide[::2, :1024], wide[:1].expand(2, -1)):
        assert_statistics(draft_stats(view, 50, 2), exact(view, 50, 2))


def test_top_m_in_memory_is_read_at_launch(device: str):
    logits = rows(1, 1024, torch.float32, device)
    top_m = torch.tensor([7], dtype=torch.int32, device=device)
    workspace = DraftStatsWorkspace.create(3, device)
    for value in (7, 1000, 10**9):
        top_m.fill_(value)
        assert_statistics(draft_stats(logits, top_m, 1, workspace=workspace), exact(logits, value, 1))
    assert reference.draft_stats(logits, top_m).entropy == reference.draft_stats(logits, 10**9).entropy


def test_given_buffers_are_written_and_a_workspace_serves_again(device: str):
    out = DraftStats(
        torch.empty(2, 2, dtype=torch.int64, device=device),
        torch.empty(2, 2, device=device),
        *torch.empty(2, 2, device=device),
    )
    workspace = DraftStatsWorkspace.create(5, device)
    for vocab in (20_000, 300):
        logits = rows(2, vocab, torch.float32, device)
        found = draft_stats(logits, 100, 2, out=out, workspace=workspace)
        assert all(mine is theirs for mine, theirs in zip(found, out, strict=True))
        assert_statistics(found, exact(logits, 100, 2))


def places(rows: int, k: int, device: str) -> DraftStats:
    """Buffers that show where something was written."""
    return DraftStats(
        torch.full((rows, k), -7, device=device),
        torch.full((rows, k), -7.0, device=device),
        *torch.full((2, rows), -7.0, device=device),
    )


def test_each_row_has_the_place_that_it_is_given(device: str):
    logits, at = rows(3, 300, torch.float32, device), torch.tensor([5, 0, 3], device=device)
    logits[1, 0] = math.nan
    mine, theirs = places(7, 2, device), places(7, 2, device)
    assert draft_stats(logits, 100, 2, out=mine, at=at) is not None
    assert reference.draft_stats(logits, 100, 2, out=theirs, at=at) is theirs
    alone = draft_stats(logits, 100, 2)
    for found, judged, own in zip(mine, theirs, alone, strict=True):
        assert torch.equal(found[at].nan_to_num(nan=-1), own.nan_to_num(nan=-1))
        others = [1, 2, 4, 6]
        assert (found[others] == -7).all() and (judged[others] == -7).all()
    assert_statistics(DraftStats(*(each[at][::2] for each in mine)), exact(logits[::2], 100, 2))
    assert all(torch.equal(theirs[0][place], mine[0][place]) for place in (5, 3))


def test_places_need_buffers(device: str):
    logits = rows(2, 64, torch.float32, device)
    at = torch.tensor([0, 1], device=device)
    with pytest.raises(ValueError, match="there is no out"):
        draft_stats(logits, 10, at=at)
    with pytest.raises(ValueError, match="at must have shape"):
        draft_stats(logits, 10, out=places(4, 1, device), at=at[:1])
    with pytest.raises(TypeError, match="at must be int64"):
        draft_stats(logits, 10, out=places(4, 1, device), at=at.int())


def test_statistics_do_not_depend_on_the_batch(device: str):
    logits = rows(3, 9000, torch.float32, device)
    together = draft_stats(logits, 100, 2)
    alone = draft_stats(logits[1:2], 100, 2)
    assert all(torch.equal(a[1:2], b) for a, b in zip(together, alone, strict=True))


def test_more_rows_than_a_grid_is_high(monkeypatch: pytest.MonkeyPatch):
    grids = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(stats_scan, "scan_kernel", Recorder())
    stats_scan.scan(torch.zeros(1, 8193).expand(70_000, -1), torch.zeros(0), torch.zeros(0))
    # CUDA's limit of every dimension but the first
    assert math.prod(grids[0]) == 140_000 and all(size <= 65_535 for size in grids[0][1:])


def test_an_empty_batch_has_empty_statistics(device: str):
    found = draft_stats(torch.zeros(0, 50, device=device), 10, 3)
    assert found.token_ids.shape == (0, 3) and found.entropy.shape == (0,)


@pytest.mark.parametrize("vocab", [1, 2, 8192, 8193, 32_000, 128_256, 151_936, 262_144, 262_145, 524_288])
def test_groups_cover_the_vocabulary_within_the_workspace(vocab: int):
    group = stats_scan.group_size(vocab)
    assert math.ceil(vocab / group) <= stats_scan.GROUPS
    assert math.ceil(vocab / stats_scan.CHUNK) <= stats_scan.CHUNKS
    assert stats_scan.CHUNK % group == 0


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"logits": torch.zeros(3)}, ValueError, "logits must have shape"),
        ({"logits": torch.zeros(2, 8).double()}, TypeError, "logits must be float32 or bfloat16 or float16"),
        ({"logits": torch.zeros(8, 2).t()}, ValueError, "logits must have stride 1"),
        ({"logits": torch.zeros(1, 524_289)}, ValueError, "vocabulary must be between 1 and 524288"),
        ({"k": 9}, ValueError, "k must be between 1 and 8"),
        ({"logits": torch.zeros(1, 50), "k": 33}, ValueError, "k must be between 1 and 32"),
        ({"top_m": 0}, ValueError, "top_m must be at least 1"),
        ({"top_m": 2.0}, TypeError, "top_m must be an int"),
        ({"top_m": torch.ones(2, dtype=torch.int32)}, ValueError, "top_m must be one number"),
        ({"top_m": torch.ones(1)}, TypeError, "top_m must be int32"),
        ({"workspace": DraftStatsWorkspace.create(1, "cpu")}, ValueError, "workspace is for 1 rows"),
        ({"workspace": torch.zeros(2)}, TypeError, "workspace must be a DraftStatsWorkspace"),
        ({"workspace": DraftStatsWorkspace.create(2, "meta")}, ValueError, "workspace must be on cpu"),
        ({"out": DraftStats(*torch.zeros(4, 2, 1))}, TypeError, "out.token_ids must be int64"),
    ],
)
def test_refuses_and_names_the_argument(arguments: dict[str, Any], error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        draft_stats(**({"logits": torch.zeros(2, 8), "top_m": 3} | arguments))


@pytest.mark.parametrize("name", ["partial", "group_max", "hits", "packed", "packed_ids"])
def test_a_workspace_refuses_buffers_that_are_not_its_own(name: str):
    sound = DraftStatsWorkspace.create(2, "cpu")
    buffer = getattr(sound, name)
    faults: list[tuple[Any, type[Exception]]] = [
        (None, TypeError),
        (buffer.double(), TypeError),
        (buffer[..., :-1], ValueError),
        (buffer.new_zeros(2, *(2 * size for size in buffer.shape[1:]))[..., : buffer.shape[-1]], ValueError),
        # the first one says how many rows there are, and where
        *([] if name == "partial" else [(buffer[:1], ValueError), (buffer.to("meta"), ValueError)]),
    ]
    for fault, error in faults:
        with pytest.raises(error, match=f"DraftStatsWorkspace: {name} must"):
            replace(sound, **{name: fault})
    apart = buffer.new_zeros(2, 2, *buffer.shape[1:])[:, 0]
    with pytest.raises(ValueError, match=f"DraftStatsWorkspace: {name} must be contiguous"):
        replace(sound, **{name: apart})
