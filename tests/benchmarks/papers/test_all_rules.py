"""The rules of all papers side by side: on the same states, each where it has settings, one of them by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.papers import all_rules, c2t_v1_trees
from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers.all_rules import AT, CHAIN, COLUMNS, EAGLE1, EAGLE2, TREE, Rule
from benchmarks.papers.c2t_v1_common import PAPER_FEATURES_FILE
from benchmarks.papers.experiment import Bench
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.collect import collect, run_live
from c2t_plugin.lab.curves import PromptSums
from c2t_plugin.lab.plans import CollectPlan, TreeShape
from c2t_plugin.lab.policies.eagle2 import Eagle2
from c2t_plugin.lab.sweeps import eagle2_sweep, truncate

pytestmark = pytest.mark.slow

NEW = 4


def rule(taus: list[float], gammas: list[float], shape: str = TREE) -> Rule:
    """Two prompts that bring the same."""
    steps, verified, accepted = (
        np.array([[each, each] for each in part]) for part in ([1.0] * len(taus), gammas, taus)
    )
    return Rule(shape, "a paper", "nodes", PromptSums(np.arange(len(taus)), steps, verified, accepted))


@pytest.fixture(scope="module")
def bench(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The tiny pair's stand-alone draft, recorded at more prompts than are drafted for live."""
    pair = tmp_path_factory.mktemp("all-rules") / "pair"
    pair.mkdir()
    for source in tiny_pair.iterdir():
        if source.name != "draft":
            (pair / source.name).symlink_to(source)
    (pair / "draft").mkdir()
    for source in (tiny_pair / "draft").iterdir():
        (pair / "draft" / source.name).symlink_to(source)
    torch.manual_seed(0)
    spec = ClassifierSpec(features=("joint_log_prob", "entropy", "depth"), top_m=1000, training={"recipe": "default"})
    classifier = NodeClassifier(spec).eval().requires_grad_(False)
    save_classifier(classifier, pair / "draft" / PAPER_FEATURES_FILE)
    found = Bench(pair, pair, quick=True)
    found._classifiers["draft"] = classifier
    plan = CollectPlan(
        draft="draft", shape=TreeShape(k=4, layers=10), trees=5 * NEW, prompts="held-out", new_tokens=NEW
    )
    found._traces |= dict.fromkeys((("draft", "held-out"), ("draft", "train")), collect(pair, plan))
    return found


def test_live_states_are_those_of_the_record(bench: Bench) -> None:
    traces = bench.traces("draft")
    plan = CollectPlan(draft="draft", shape=TreeShape(layers=3), trees=3 * NEW, prompts="held-out", new_tokens=NEW)
    prompt, outcomes = run_live(bench.pair, plan, {"five": Eagle2(max_nodes=5, k=4, d_max=3)})
    held, order = all_rules.same_states(traces, prompt)
    assert len(held) == 3 * NEW < len(traces)
    replayed = eagle2_sweep(truncate(held.tree, 3))
    assert outcomes["five"].accepted[order].tolist() == replayed.tau[4].tolist()
    with pytest.raises(C2TError, match="collect the traces again"):
        all_rules.same_states(traces, prompt[1:])


def test_every_rule_has_a_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_rules, "DRAFTS", {"draft": "stand-alone"})
    monkeypatch.setattr(all_rules, "QUICK_STATES", 2 * NEW)
    found = all_rules.EXPERIMENTS[0].findings(bench)
    rows = {row["rule"]: row for row in found.rows}
    assert len(rows) == len(found.rows) == 25
    assert {row["paper"] for row in found.rows} == {"C2T v1", "DySpec", "DySpec's rival", "Entropy trees"}
    assert {row["rule"] for row in found.rows if row["shape"] == CHAIN} >= {"static chain", "DyMax", "DyJoint"}
    # one setting, whose tau is that of its column
    assert rows[EAGLE1]["EAGLE-1's tau"] == 25
    assert rows[EAGLE2]["gamma / EAGLE-2"] in (None, 1.0)


def test_table_4_is_drafted_live(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-1's tree asks for what no record holds; EAGLE-2's and C2T's are those of the record at the same states."""
    monkeypatch.setattr(common, "titles", lambda bench: {"draft": "stand-alone"})
    monkeypatch.setattr(c2t_v1_trees, "QUICK_STATES", 2 * NEW)
    rows = c2t_v1_trees.EXPERIMENTS[0].findings(bench).rows
    assert [row["method"] for row in rows] == ["EAGLE-1", "EAGLE-2", "EAGLE-2", "C2T", "C2T"]
    assert [row["gamma"] for row in rows[:3]] == [25.0, 25.0, 59.0]
    traces = bench.traces("draft")
    held = traces[torch.isin(traces.prompt, traces.prompt.unique()[:2])]
    assert rows[1]["tau"] == pytest.approx(common.Ground.of(held, 6).eagle2_at(26).tau)
    assert "draft/c2t_classifier_paper_features.safetensors" in bench.files and "target" in bench.files


def test_a_rule_is_read_between_its_settings_only() -> None:
    steep, flat = rule([1.0, 3.0], [4.0, 10.0]), rule([0.5, 4.0], [1.0, 15.0])
    row = all_rules._row("a draft", "a rule", steep, flat, 2.0, np.ones((3, 2)))
    assert list(row) == list(COLUMNS)
    found = [row[f"tau {tau:g}"] for tau in all_rules.TAUS]
    assert found == [None, 4.0, pytest.approx(5.5), pytest.approx(7.0), pytest.approx(8.5), 10.0, None]
    assert row["EAGLE-1's tau"] == pytest.approx(7.0)
    # EAGLE-2's are 3, 5, 7, 9 and 11 at tau 1 to 3, and 7 again at EAGLE-1's 2
    ratios = [4 / 3, 5.5 / 5, 7 / 7, 8.5 / 9, 10 / 11, 7 / 7]
    assert row["gamma / EAGLE-2"] == pytest.approx(np.mean(ratios)) == row["from"] == row["to"]
    nowhere = all_rules._row("a draft", "a rule", rule([9.0], [9.0]), flat, 2.0, np.ones((3, 2)))
    assert nowhere["gamma / EAGLE-2"] is None and nowhere["tau 1"] is None


def test_the_remark_names_the_cheapest() -> None:
    rows = [
        {"rule": name, **dict.fromkeys(AT), "tau 1": gamma, "tau 2": other}
        for name, gamma, other in (("one", 3.0, None), ("two", 2.0, 8.0), ("three", None, 9.0))
    ]
    assert all_rules.fewest(rows) == "tau 1 two, tau 2 two"
