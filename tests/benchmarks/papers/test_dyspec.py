"""DySpec's experiments: rows on tiny data, and figures checked by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.papers import blocks, dyspec_acceptance, dyspec_blocks, dyspec_overhead, dyspec_trees
from benchmarks.papers.experiment import Bench
from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.replay import Outcomes
from c2t_plugin.lab.verify import Verification, compatible
from c2t_plugin.traces.file import Traces

pytestmark = pytest.mark.slow

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
    ours = found.figure.axes[0].containers[0]
    assert [bar.get_width() for bar in ours] == [row["ours"] for row in found.rows[: len(ours)]]


@pytest.mark.slow
def test_random_trees_stand_beside_table_5(bench: Bench) -> None:
    found = dyspec_blocks.EXPERIMENTS[0].findings(bench)
    assert {row["generator"] for row in found.rows} == set(blocks.GENERATORS)
    assert found.figure is not None and "nearest generator" in found.remark


# ---- tables 1 to 4


def test_printed_tokens_stand_beside_the_rule_they_are_of() -> None:
    trees = dyspec_trees
    assert trees.printed_tokens(3, 0.0, trees.GREEDY) == {"C4": 9.1, "OWT": 7.23, "CNN": 6.93}
    assert trees.printed_tokens(4, 0.6, trees.THRESHOLD) == {"C4": 7.14, "OWT": 7.66, "CNN": 7.02}
    assert trees.printed_tokens(4, 0.6, trees.GREEDY) == {} == trees.printed_tokens(1, 0.0, trees.EAGLE2)
    assert trees.printed_tokens(2, 0.6, trees.SEQUENCES) == {"C4": 3.15, "OWT": 2.75, "CNN": 2.84}


@pytest.mark.slow
def test_no_rule_has_more_nodes_than_the_table_says() -> None:
    acceptance = torch.tensor([0.5, 0.2, 0.1] + [0.0] * 13, dtype=torch.float64)
    for nodes, setting in dyspec_trees.SETTINGS.items():
        found = dyspec_trees.rules(setting, acceptance)
        assert len(found[dyspec_trees.SEQUOIA].policy.paths) == nodes
        for shape in (setting.sequences, setting.branches):
            assert len(shape) <= setting.depth
            width, total = 1, 0
            for branches in shape:
                width *= branches
                total += width
            assert 0.95 * nodes <= total <= nodes
        for rule in found.values():
            if rule.rejection is not None:
                assert rule.policy.temperature == 0.6


def test_every_rule_meets_a_verification_it_is_exact_for() -> None:
    setting = dyspec_trees.SETTINGS[64]
    used = {Verification.WITHOUT_REPLACEMENT, Verification.MULTI_ROUND}
    verified = set()
    for rule in dyspec_trees.rules(setting, torch.tensor([0.5, 0.3])).values():
        if rule.rejection is not None:
            compatible(rule.policy.drafting, rule.rejection)
            (other,) = used - {rule.rejection}
            with pytest.raises(ConfigError):
                compatible(rule.policy.drafting, other)
            verified.add(rule.rejection)
    assert verified == used


@pytest.mark.parametrize("index", [0, 1])
def test_tables_run_on_a_tiny_pair(tmp_path: Path, tiny_pair: Path, index: int) -> None:
    found = dyspec_trees.EXPERIMENTS[index].findings(Bench(tiny_pair, tmp_path, quick=True))
    assert [row["target temperature"] for row in found.rows] == [0.0] * 10 + [0.6] * 10
    for row in found.rows:
        assert 1 <= row["low"] <= row["tokens per step"] <= row["high"] <= 5
        assert 0 < row["nodes per tree"] <= 8
    assert found.remark.startswith("At target temperature 0: most tokens per step")


def test_serving_is_pooled_over_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dyspec_trees, "STARTS", 2)
    accepted = torch.tensor([1, 0, 2, 0, 0, 3])
    same = torch.full_like(accepted, 4)
    outcomes = Outcomes(same, accepted, same, same, same)
    found = dyspec_trees.Measured.of(outcomes, torch.tensor([5, 5, 5, 5, 9, 9]))
    # prompt 5: states 0 and 2, then 1 and 2; prompt 9: 4 and 5, then 5
    assert found.steps.tolist() == [4, 3]
    assert found.tokens.tolist() == [2 + 3 + 1 + 3, 1 + 4 + 4]
    assert found.per_step == pytest.approx(18 / 7) and found.gamma == 4
    low, high = found.bounds()
    assert low == pytest.approx(9 / 4) and high == pytest.approx(9 / 3)


def test_acceptance_by_draw_counts_ranks(tmp_path: Path, tiny_pair: Path) -> None:
    """Of a greedy target every draw but one is refused; all tokens together hold its token."""
    bench = Bench(tiny_pair, tmp_path, quick=True)
    every = dyspec_trees.acceptance_by_draw(bench, 0.0, 300, 0)
    assert float(every.sum()) == pytest.approx(1.0)
    few = dyspec_trees.acceptance_by_draw(bench, 0.6, 3, 0)
    assert len(few) == 3 and 0 <= float(few.sum()) <= 1


# ---- figures 2 and 5


def test_bins_by_hand() -> None:
    draft = torch.tensor([0.02, 0.1, 0.15, 0.9, 1.0], dtype=torch.float64)
    target = torch.tensor([0.01, 0.3, 0.01, 0.45, 1.0], dtype=torch.float64)
    accepted = (target / draft).clamp_max(1)
    rows = {row["draft probability from"]: row for row in dyspec_acceptance.bins(draft, target, accepted)}
    assert sum(row["words"] for row in rows.values()) == 5
    assert rows[0.1]["words"] == 2 and rows[0.1]["acceptance"] == pytest.approx((1 + 0.01 / 0.15) / 2)
    assert rows[0.1]["accepted always"] == rows[0.1]["accepted below .1"] == 0.5
    # the last bin has its upper end
    assert rows[0.9]["acceptance"] == pytest.approx(0.75) and rows[0.9]["target probability"] == pytest.approx(0.725)
    assert rows[0.5]["words"] == 0 and rows[0.5]["acceptance"] is None


def test_densities_sum_to_one_by_column() -> None:
    draft = torch.tensor([0.01, 0.02, 0.99, 1.0], dtype=torch.float64)
    found = dyspec_acceptance.density(draft, torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    assert found[0, 0] == found[0, -1] == 0.5 and found[-1, -1] == 1 and float(found.sum()) == 2


def test_acceptance_figures_run_on_a_tiny_pair(tmp_path: Path, tiny_pair: Path) -> None:
    bench = Bench(tiny_pair, tmp_path, quick=True)
    second, fifth = (experiment.findings(bench) for experiment in dyspec_acceptance.EXPERIMENTS)
    assert sum(row["words"] for row in second.rows) == len(dyspec_acceptance.probable_tokens(bench)[0])
    assert [row["threshold"] for row in fifth.rows] == [0.1, 0.03]
    assert fifth.rows[0]["mean size"] < fifth.rows[1]["mean size"] and fifth.rows[0]["smallest"] >= 1
    assert second.figure is not None and fifth.figure is not None
