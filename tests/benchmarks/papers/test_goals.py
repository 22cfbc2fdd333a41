"""The goals as rows: what counts as reached, what is compared with what, and that losing is printed as losing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pairs.toy import SHIPPED
from benchmarks.papers import goals, goals_fit, goals_transfer
from benchmarks.papers.c2t_v1_common import PAPER_FEATURES_FILE
from benchmarks.papers.catalogue import REGISTRY
from benchmarks.papers.experiment import Bench, Row
from benchmarks.papers.goals import EXTENDED, THREE, TITLES, Measured, at_most, gained
from benchmarks.papers.goals_transfer import FOREIGN, OWN, TUNED
from c2t_plugin.classifier import FILE_NAME, load_classifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab import plans
from c2t_plugin.lab.judging import evaluate_chains, evaluate_trees
from c2t_plugin.lab.pairs import describe_pair
from c2t_plugin.traces.file import Traces, save_traces

pytestmark = pytest.mark.slow

NAN = float("nan")
DRAFTS = {name: TITLES[name] for name in ("eagle3", "draft")}


@pytest.fixture
def bench(toy_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(goals_transfer, "small_bench", lambda bench: replace(bench, prefix="small-", _traces={}))
    monkeypatch.setattr(goals, "TITLES", DRAFTS)
    return toy_bench


def rows_of(bench: Bench, name: str) -> Sequence[Row]:
    """Of an experiment; they have its columns, and no NaN, which a page of JSON has no word for."""
    rows = REGISTRY.experiments[name].findings(bench).rows
    assert rows and all(cell == cell for row in rows for cell in row.values())
    return rows


def test_every_draft_of_the_pair_has_goals() -> None:
    assert set(TITLES) == set(plans.DRAFTS)


@pytest.mark.parametrize("file", [FILE_NAME, PAPER_FEATURES_FILE])
@pytest.mark.parametrize("draft", plans.DRAFTS)
def test_every_draft_ships_with_classifiers_of_its_own(draft: str, file: str) -> None:
    spec = load_classifier(SHIPPED / draft / file).spec
    assert spec.pair == describe_pair(SHIPPED, draft)
    assert len(spec.features) == (3 if file == PAPER_FEATURES_FILE else 7)
    for run in (spec.training["run"], spec.training["traces"]["run"]):
        assert run["git_sha"] and run["seed"] == 0 and not run["dirty"]


def test_the_replays_speed_is_counted_in_nodes(bench: Bench) -> None:
    rows = rows_of(bench, "goals-replay")
    held = bench.traces("draft")
    assert [row["nodes"] for row in rows] == [len(held) * (4 + 4 * 16)] * 4
    assert all(row["M nodes/s"] > row["M nodes/s, scoring too"] > 0 for row in rows)
    assert {row["reached"] for row in rows} <= {"yes", "no"}


@pytest.mark.parametrize(
    ("cost", "reached"),
    [((599.0, 3.9), "yes"), ((601.0, 3.9), "no"), ((599.0, 4.1), "no")],
    ids=["kept", "slow", "big"],
)
def test_a_fit_must_keep_both_its_limits(
    cost: tuple[float, float], reached: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goals_fit, "fit_apart", lambda *arguments: cost)
    rows = rows_of(bench, "goals-fit")
    assert [(row["seconds"], row["GB"], row["reached"]) for row in rows] == [(*cost, reached)] * 4


def test_a_fit_is_measured_in_a_process_of_its_own(
    bench: Bench, make_traces: Callable[..., Traces], tmp_path: Path
) -> None:
    save_traces(bench.traces("draft", "train"), tmp_path / "known.traces")
    # the toy's chains are shorter than those that `c2t fit` reports on
    with pytest.raises(C2TError, match=r"c2t fit ended with .*d-max is 6"):
        goals_fit.fit_apart(tmp_path / "known.traces", "default", 0)
    save_traces(make_traces(layers=6), tmp_path / "deep.traces")
    seconds, memory = goals_fit.fit_apart(tmp_path / "deep.traces", "default", 0)
    # torch alone takes more than this
    assert seconds > 0 and 0.1 < memory < 8


@pytest.mark.parametrize(
    ("measured", "reached"),
    [
        (Measured(0.7, 0.6, 0.8), "yes"),
        (Measured(0.8, 0.7, 0.9), "estimate only"),
        (Measured(0.81, 0.7, 0.9), "no"),
        (Measured(0.7, NAN, NAN), "estimate only"),
        (Measured(NAN, NAN, NAN), None),
    ],
)
def test_what_counts_as_reached(measured: Measured, reached: str | None) -> None:
    assert at_most(measured, 0.8)["reached"] == reached
    assert at_most(measured, None)["reached"] is None


@pytest.mark.parametrize(
    ("gain", "reached"),
    [
        (Measured(0.012, 0.002, 0.02), "yes"),
        (Measured(0.0094, 0.002, 0.02), "no"),
        (Measured(0.012, -0.001, 0.02), "no"),
    ],
)
def test_a_gain_of_auc_needs_its_size_and_its_interval(gain: Measured, reached: str) -> None:
    cells = gained(gain)
    assert cells["reached"] == reached and cells["measured"] == pytest.approx(100 * gain.value)


def test_trees_are_those_of_evaluate(bench: Bench) -> None:
    rows = rows_of(bench, "goals-trees")
    held = bench.traces("draft")
    found = evaluate_trees(goals.classifiers(bench, "draft"), held, goals.plan(bench, held))
    for name in (THREE, EXTENDED):
        (rule,) = (rule for rule in found.rules if rule.name == name)
        for against in ("EAGLE-2", "P"):
            wanted = ("stand-alone", name, against)
            own = [row for row in rows if (row["draft"], row["features"], row["against"]) == wanted]
            compared = rule.compared[against]
            lows = [low for low, _ in (*compared["ratio_interval"], compared["mean_interval"])]
            for column, expected in (("measured", [*compared["ratio"], compared["mean"]]), ("from", lows)):
                assert [row[column] for row in own] == [None if value != value else value for value in expected]
    assert {row["draft"] for row in rows} == set(DRAFTS.values())


def test_the_goals_constants_are_those_that_were_set() -> None:
    """Candidates of EAGLE-2's at every tau and on average, of P's, of static chains', of every rival's; AUC; speed."""
    assert goals.OF_EAGLE2 == {"head": (0.80, 0.75), "draft": (0.90, None)}
    assert (goals.OF_P, goals.OF_STATIC, goals.OF_RIVALS) == (0.85, 0.85, 1.0)
    assert (goals.AUC_GAIN, goals.NODES_PER_SECOND) == (0.01, 1_000_000)


def test_goals_are_those_that_were_set(bench: Bench) -> None:
    rows = rows_of(bench, "goals-trees")
    ours = [row for row in rows if row["features"] == EXTENDED]
    asked = {
        (row["draft"] == "stand-alone", row["against"], row["at"] == "mean", row["goal"])
        for row in ours
        if row["goal"] is not None
    }
    assert asked == {
        (False, "EAGLE-2", False, "at most 0.8"),
        (False, "EAGLE-2", True, "at most 0.75"),
        (True, "EAGLE-2", False, "at most 0.9"),
        (False, "P", False, "at most 0.85"),
        (True, "P", False, "at most 0.85"),
    }
    of_p = [row["goal"] for row in ours if row["draft"] == "stand-alone" and row["against"] == "P"]
    middle = (len(of_p) - 1) // 2
    # from the middle of the taus on; the last row is the mean
    assert of_p == [None] * middle + ["at most 0.85"] * (len(of_p) - 1 - middle) + [None]
    # an untrained classifier loses, and the rows say so
    assert "no" in {row["reached"] for row in ours}


def test_chains_are_held_against_every_rival(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("c2t_plugin.lab.rivals.OnlineLogistic.REFIT_INTERVAL", 1)
    monkeypatch.setattr(goals, "TITLES", {"eagle3": TITLES["eagle3"]})
    bench = replace(bench, quick=False)
    held = bench.traces("eagle3")
    found = evaluate_chains(
        goals.classifiers(bench, "eagle3"), held, bench.traces("eagle3", "train"), goals.plan(bench, held)
    )
    rivals = [rule.name for rule in found.rules if rule.name not in (THREE, EXTENDED)]
    assert {"P", "DyMax", "entropy", "vLLM's estimator, online", goals.ESTIMATOR} <= set(rivals)
    for rule in found.rules:
        expected = ["static", *rivals] if rule.name in (THREE, EXTENDED) else ["static", "P"]
        assert set(rule.compared) == set(expected) - {rule.name}
    rows = rows_of(bench, "goals-chains")
    own = [row for row in rows if row["draft"] == TITLES["eagle3"] and row["features"] == EXTENDED]
    assert {row["against"] for row in own} == {"static", *rivals}
    (gain,) = (row for row in own if row["at"] == goals.AUC_GAINED)
    reached = [row["reached"] != "no" for row in own if str(row["at"]).startswith(goals.MEAN_OF)]
    assert len(reached) == len(rivals)
    assert f"means against rivals {sum(reached)} of {len(rivals)}, AUC " in goals.summary(own)
    (rule,) = (rule for rule in found.rules if rule.name == EXTENDED)
    assert rule.auc_gain is not None and gain["measured"] == pytest.approx(100 * rule.auc_gain)


def test_the_remark_names_what_intervals_are_over(bench: Bench) -> None:
    for draft in DRAFTS:
        traces = bench.traces(draft)
        bench._traces[draft, "held-out"] = replace(traces, group=(traces.prompt // 2).int())
    assert "bootstrap over their 2 sources" in REGISTRY.experiments["goals-trees"].findings(bench).remark


def test_every_block_of_transfer_has_its_own_and_a_foreign_classifier(bench: Bench) -> None:
    rows = rows_of(bench, "goals-transfer")
    blocks = dict.fromkeys((row["between"], row["used on"]) for row in rows)
    assert list(blocks) == [
        ("drafts", "stand-alone"),
        ("drafts", "EAGLE-3 head"),
        ("targets", "small target"),
        ("targets", "target"),
        *(("corpora", kind) for kind in ("docstrings", "tests", "arithmetic", "dialogue")),
    ]
    for block in blocks:
        names = [row["classifier"] for row in rows if (row["between"], row["used on"]) == block]
        assert names == ["P", OWN, FOREIGN, TUNED]


def test_fine_tuning_changes_the_foreign_classifier_alone(bench: Bench) -> None:
    for case in goals_transfer.between_drafts(bench):
        before, after = case.by[FOREIGN], case.by[TUNED]
        assert before.spec.features == after.spec.features
        assert any(not (one == two).all() for one, two in zip(before.parameters(), after.parameters(), strict=True))
    first, second = goals_transfer.between_targets(bench)
    # what is at home over one target is foreign over the other
    assert first.by[OWN] is second.by[FOREIGN] and first.by[FOREIGN] is second.by[OWN]


def test_what_is_lost_is_a_mean_over_the_blocks() -> None:
    names = {"between": "drafts", "fitted on": "x"}
    values = {"one": {OWN: 0.5, FOREIGN: 1.0, TUNED: 0.75}, "two": {OWN: 0.5, FOREIGN: 0.5, TUNED: 0.25}}
    rows = [
        {**names, "used on": used, "classifier": name, "chains / static": value, "trees / EAGLE-2": None}
        for used, by in values.items()
        for name, value in by.items()
    ]
    assert "drafts: chains 1.500x, fine-tuned 1.000x; trees unknown" in goals_transfer.lost(rows)
