"""DySpec's experiments: rows on tiny data, and figures checked by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from c2t_plugin.lab import blocks
from c2t_plugin.lab.reproduce import dyspec_blocks, dyspec_overhead
from c2t_plugin.lab.reproduce.experiment import Bench
from c2t_plugin.lab.traces import Traces

PARENTS = torch.tensor([-1, 0, 0, 1])


@pytest.fixture
def bench(tmp_path: Path, make_traces: Callable[..., Traces]) -> Bench:
    bench = Bench(tmp_path / "pair", tmp_path / "traces", quick=True)
    bench._traces[("draft", "held-out")] = make_traces(prompts=2, steps=4, k=3, layers=4)
    return bench


def test_overhead_says_what_its_rows_say(bench: Bench) -> None:
    found = dyspec_overhead.EXPERIMENTS[0].findings(bench)
    # five rows of table 3 have 6.4 tokens or more, table 4's three at T = 0 have 768 / 70 or more
    assert "above the printed bound in 8 of 24 rows" in found.remark
    # OWT and CNN at 0, CNN at .6 in table 1; all three at .6 in table 4
    assert "more tokens per step than DySpec in 6 of 24" in found.remark


def test_the_latency_model_is_a_median_of_ratios() -> None:
    at = "DySpec 4.3, acceleration 1 / k at T_t / T_d ="
    rows = [{"what": f"{at} 2000, {name}", "paper": 2.0, "ours": ours} for name, ours in (("a", 1), ("b", 3), ("c", 8))]
    rows += [{"what": f"{at} 200, a", "paper": 4.0, "ours": 1.0}]
    assert "is 1.50x with the printed" in dyspec_overhead.remark(rows)
    assert "0.25x with the 200" in dyspec_overhead.remark(rows)


def test_masks_by_hand() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert dyspec_blocks.mask(PARENTS).int().tolist() == expected
    assert [axes.get_title() for axes in dyspec_blocks.figure_7_masks(PARENTS).axes] == [
        "insertion order",
        "depth-first order",
        "heavy-path order",
    ]


def test_masks_are_counted_in_every_order(bench: Bench) -> None:
    found = dyspec_blocks.EXPERIMENTS[1].findings(bench)
    assert [row["order"] for row in found.rows] == ["insertion", "depth-first", "heavy-path"]
    # all 30 nodes of a tree of 3 + 3 * 9 fit into one block, which holds the sum of their depths
    for row in found.rows:
        assert row["nodes"] == 30 and row["non-zero blocks"] == 1 and row["trees"] == 2
        assert row["entries per block"] == pytest.approx(3 * 1 + 9 * (2 + 3 + 4))


def test_blocks_behind_a_prefix(bench: Bench) -> None:
    found = dyspec_blocks.EXPERIMENTS[2].findings(bench)
    assert {row["drafted"] for row in found.rows} == {"greedily", "layer by layer"}
    # a prefix of n tokens and one block of nodes cross ceil((n + 30) / 32) blocks
    expected = sum(-(-(prefix + 30) // 32) for prefix in blocks.FIGURE_9_PREFIXES) / len(blocks.FIGURE_9_PREFIXES)
    assert all(row["ours"] == pytest.approx(expected, abs=0.01) for row in found.rows)
    assert "0% (greedily, 30 nodes)" in found.remark and "40% (768 nodes)" in found.remark


@pytest.mark.slow
def test_random_trees_stand_beside_table_5(bench: Bench) -> None:
    found = dyspec_blocks.EXPERIMENTS[0].findings(bench)
    assert {row["generator"] for row in found.rows} == set(blocks.GENERATORS)
    assert found.figure is not None and "nearest generator" in found.remark
