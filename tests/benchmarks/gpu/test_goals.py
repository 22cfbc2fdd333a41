"""What the GPU run says of the goals of docs/kernels.md, by rows made here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu.goals import goals
from benchmarks.gpu.part import GpuRow

ORDERS_2048 = {"drafted": 24.8, "depth-first": 11.2, "heavy paths": 11.3}


def timed(part: str, provider: str, us: float, of_copy: float = 0.5, **shape: int | str) -> GpuRow:
    return GpuRow(part, provider, shape, {}, us=us, of_copy=of_copy)


def kept(rows: list[GpuRow]) -> Iterator[tuple[str, str]]:
    for line in goals(rows):
        _, goal, by = line.split(": ", 1)[0], line.split(": ", 1)[1].rpartition(": ")[0], line.rpartition(": ")[2]
        yield goal, by


def test_goals_are_judged_by_the_rows_that_there_are():
    assert list(goals([])) == []
    rows = [
        *(timed("stats", "fused", 9.0, bs=1), timed("stats", "fused", 11.0, bs=32)),
        *(timed("stats", "fused", 20.0, of_copy=0.81, bs=64), timed("stats", "fused", 40.0, of_copy=0.79, bs=128)),
        *(timed("stats", "torch.topk alone", 30.0, bs=64), timed("stats", "torch.topk alone", 39.0, bs=128)),
        *(timed("attention", "fused", 10.0, bs=1), timed("attention", "sglang extend", 15.0, bs=1)),
        timed("attention", "flashinfer", 9.0, bs=1),
    ]
    assert dict(kept(rows)) == {
        "draft_stats: at least 80% of a copy's bandwidth from 64 rows on": "kept by 1 of 2",
        "draft_stats: at most 10 us up to 32 rows": "kept by 1 of 2",
        "draft_stats: never slower than torch.topk alone": "kept by 1 of 2",
        "tree_attention: 1.5 times as fast as SGLang's extend": "kept by 1 of 1",
        "tree_attention: within 1.1 times FlashInfer's time": "kept by 0 of 1",
    }


def test_table_5_compares_the_orders_of_one_tree():
    times = {"drafted": 20.0, "depth-first": 10.0, "heavy paths": 11.0}
    rows = [timed("table5", "fused", us, nodes=1024, order=order) for order, us in times.items()]
    rows += [timed("table5", "manual", 70.0, nodes=1024, order=order) for order in times]
    assert dict(kept(rows)) == {
        "table 5, 1024 nodes: reordering is worth 1.99 times": "kept by 1 of 2",
        "table 5, 1024 nodes: at most .153 of manual attention's time": "kept by 1 of 2",
    }


def test_small_launches_and_large_tables_are_judged_too():
    rows = [
        *(timed("chain", "fused", 4.9, bs=256), timed("chain", "fused", 9.0, bs=128)),
        *(timed("growth", "fused", 39.0, bs=1, nodes=64), timed("growth", "fused", 41.0, bs=64, nodes=64)),
        *(timed("attention", "fused", 11.0, bs=1), timed("attention", "sdpa, contiguous", 10.0, bs=1)),
        *(timed("attention", "fused", 11.1, bs=16), timed("attention", "sdpa, contiguous", 10.0, bs=16)),
        *(timed("table5", "fused", us, nodes=2048, order=order) for order, us in ORDERS_2048.items()),
        *(timed("table5", "manual", 100.0, nodes=2048, order=order) for order in ORDERS_2048),
    ]
    assert dict(kept(rows)) == {
        "score_chain and early_stop: at most 5 us for 256 requests": "kept by 1 of 1",
        "grow_layer and build_tree: at most 40 us for 64 nodes": "kept by 1 of 2",
        "tree_attention: within 1.1 times SDPA's time": "kept by 1 of 2",
        "table 5, 2048 nodes: reordering is worth 2.21 times": "kept by 1 of 2",
        "table 5, 2048 nodes: at most .112 of manual attention's time": "kept by 1 of 2",
    }
    slower = [replace(row, us=5.1) for row in rows if row.part == "chain"]
    assert ("score_chain and early_stop: at most 5 us for 256 requests", "kept by 0 of 1") in kept(slower)
