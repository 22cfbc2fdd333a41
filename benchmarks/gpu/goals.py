"""What the kernels are meant to reach on an H200, judged from the rows of one GPU run: kept or missed, how often.

The goals are wishes written down before anything was measured; a missed one fails no run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.gpu.part import GpuRow

Shape = Mapping[str, int | str]


def goals(rows: Sequence[GpuRow]) -> Iterator[str]:
    """A line for each goal that the rows can judge."""
    checks: list[tuple[str, list[bool]]] = [
        ("draft_stats: at least 80% of a copy's bandwidth from 64 rows on", list(_bandwidth(rows))),
        (
            "draft_stats: at most 10 us up to 32 rows",
            _within(rows, "stats", 10.0, lambda shape: int(shape["bs"]) <= 32),
        ),
        ("draft_stats: never slower than torch.topk alone", _against(rows, "stats", "torch.topk alone", 1.0)),
        (
            "score_chain and early_stop: at most 5 us for 256 requests",
            _within(rows, "chain", 5.0, lambda shape: shape["bs"] == 256),
        ),
        ("grow_layer and build_tree: at most 40 us for 64 nodes", _within(rows, "growth", 40.0)),
        ("tree_attention: 1.5 times as fast as SGLang's extend", _against(rows, "attention", "sglang extend", 1 / 1.5)),
        ("tree_attention: within 1.1 times FlashInfer's time", _against(rows, "attention", "flashinfer", 1.1)),
        ("tree_attention: within 1.1 times SDPA's time", _against(rows, "attention", "sdpa, contiguous", 1.1)),
        ("table 5, 1024 nodes: reordering is worth 1.99 times", list(_reordering(rows, 1024, 1.99))),
        ("table 5, 2048 nodes: reordering is worth 2.21 times", list(_reordering(rows, 2048, 2.21))),
        ("table 5, 1024 nodes: at most .153 of manual attention's time", _manual(rows, 1024, 0.153)),
        ("table 5, 2048 nodes: at most .112 of manual attention's time", _manual(rows, 2048, 0.112)),
    ]
    for goal, kept in checks:
        if kept:
            yield f"goal: {goal}: kept by {sum(kept)} of {len(kept)}"


def _times(rows: Sequence[GpuRow], part: str, provider: str) -> dict[tuple[tuple[str, int | str], ...], float]:
    """Microseconds by shape."""
    return {
        tuple(sorted(row.shape.items())): row.us
        for row in rows
        if (row.part, row.provider) == (part, provider) and row.us is not None
    }


def _bandwidth(rows: Sequence[GpuRow]) -> Iterator[bool]:
    for row in rows:
        if (row.part, row.provider) == ("stats", "fused") and row.of_copy is not None and int(row.shape["bs"]) >= 64:
            yield row.of_copy >= 0.8


def _within(
    rows: Sequence[GpuRow], part: str, us: float, wanted: Callable[[Shape], bool] = lambda shape: True
) -> list[bool]:
    found = _times(rows, part, "fused")
    return [time <= us for shape, time in found.items() if wanted(dict(shape))]


def _against(
    rows: Sequence[GpuRow], part: str, rival: str, factor: float, wanted: Callable[[Shape], bool] = lambda shape: True
) -> list[bool]:
    """Whether our time is at most `factor` times the rival's, for each shape that both have."""
    ours, theirs = _times(rows, part, "fused"), _times(rows, part, rival)
    return [ours[shape] <= factor * theirs[shape] for shape in ours.keys() & theirs.keys() if wanted(dict(shape))]


def _manual(rows: Sequence[GpuRow], nodes: int, share: float) -> list[bool]:
    return _against(
        rows, "table5", "manual", share, lambda shape: shape["nodes"] == nodes and shape["order"] != "drafted"
    )


def _reordering(rows: Sequence[GpuRow], nodes: int, factor: float) -> Iterator[bool]:
    """The kernel's time of the tree as drafted over that of the same tree reordered, with the paper's blocks too."""
    for provider in ("fused", "fused, blocks of 32"):
        times = {
            dict(shape)["order"]: us
            for shape, us in _times(rows, "table5", provider).items()
            if dict(shape)["nodes"] == nodes
        }
        for order in times.keys() - {"drafted"}:
            if "drafted" in times:
                yield times["drafted"] / times[order] >= factor
