"""C2T's tables and figures on toy traces: rows have their columns, and one number of each kind is computed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers.c2t_recent import PRIOR, WINDOW, recent_acceptance
from benchmarks.papers.c2t_v1_common import Brought, Curve, Ground
from benchmarks.papers.c2t_v1_corpora import KINDS, corpora, halves
from benchmarks.papers.c2t_v1_features import relation
from benchmarks.papers.c2t_v1_pictures import by_entropy_and_rank
from benchmarks.papers.c2t_v1_surface import surface
from benchmarks.papers.c2t_v1_training import scores_by_epoch, top_m_traces
from benchmarks.papers.c2t_v2_equations import DRAWS, lemma_2_rows
from benchmarks.papers.c2t_v2_tables import TABLE_2, Scores, accepted_by_depth, candidates, kept_at_recall
from benchmarks.papers.catalogue import REGISTRY
from benchmarks.papers.experiment import QUICK_TREES, Bench
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab import pairs
from c2t_plugin.lab.policies.c2t import C2TTree
from c2t_plugin.lab.report import score_trees
from c2t_plugin.lab.sweeps import Sweep
from c2t_plugin.traces.file import save_traces

pytestmark = pytest.mark.slow

TABLES = [name for name in REGISTRY.experiments if name.startswith("c2t-")]
# these draft live, which toy traces cannot
LIVE = ("c2t-v1-table-4",)
PICTURES = {f"c2t-v1-figure-{number}" for number in (2, 4, 6, 7, 8, 10)} | {"c2t-v1-table-2"}


@pytest.fixture
def bench(toy_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """With the traces that table 6 would collect from the pair's models."""
    traces = toy_bench.traces("eagle3")
    monkeypatch.setattr(pairs, "describe_pair", lambda directory, draft: traces.header["pair"])
    for top_m in (4, 6):
        save_traces(traces, toy_bench.traces_dir / f"eagle3-held-out-top-{top_m}-{QUICK_TREES}.traces")
    return toy_bench


@pytest.mark.parametrize("name", [name for name in TABLES if name not in LIVE])
def test_rows_have_their_columns(bench: Bench, name: str, tmp_path: Path) -> None:
    found = REGISTRY.experiments[name].findings(bench)
    assert len(found.rows) >= 2
    # a page of JSON has no NaN
    assert all(cell == cell for row in found.rows for cell in row.values())
    if found.figure is not None:
        found.figure.savefig(tmp_path / f"{name}.png", dpi=40)
    assert (found.figure is not None) == (name in PICTURES)


def test_every_table_and_figure_of_c2t_is_there() -> None:
    sources = " ".join(REGISTRY.experiments[name].source for name in TABLES)
    tables = [f"v1 table {number}" for number in range(1, 8)] + [f"v2 table {number}" for number in (1, 2, 4, 5, 6, 7)]
    figures = [f"v1 figure {number}" for number in (2, 4, 6, 7, 8)] + ["v1 figures 9 and 10"]
    figures += [f"v2 figure {number}" for number in (1, 2, 3, 5, 6)] + ["v2 figures 4 and 7"]
    for wanted in (*tables, *figures, "v2 equations 1-5", "v2 equations 9-12"):
        assert wanted in sources, wanted


def test_threshold_is_the_cheapest_that_accepts_as_much() -> None:
    curve = Curve(np.array([3.0, 2.0, 1.0, 0.0]), np.array([1.0, 2.0, 2.0, 2.5]), np.array([2.0, 6.0, 5.0, 9.0]))
    assert curve.cheapest(1.5) == (1.0, 2.0, 5.0)
    assert curve.cheapest(2.6) is None and curve.gamma_at(2.6) is None
    # halfway between (1, 2) and (2, 5), which is cheaper than (2, 6)
    assert curve.gamma_at(1.5) == pytest.approx(3.5)
    # 5 candidates for 2 drafted tokens and the bonus
    assert common.Point(1.0, 2.0, 5.0).per_token == pytest.approx(5 / 3)


def test_eagle2s_point_counts_the_root_as_the_paper_does(bench: Bench) -> None:
    ground = Ground.of(bench.traces("draft"), 3)
    point = ground.eagle2_at(5)
    assert point.gamma == point.setting == 4
    best = ground.forest.joint_log_prob.topk(4, dim=1).indices
    hits = ground.forest.accepted.gather(1, best).sum(1)
    # one start per prompt, by hand, must agree where every state is visited from every start
    sweep = Sweep(torch.tensor([4.0]), torch.full((1, len(hits)), 4).short(), hits[None].short())
    assert point.tau == pytest.approx(float(Curve.of(ground.traces, sweep).tau[0]))
    assert ground.eagle2_at(10_000).gamma == ground.forest.accepted.shape[1]


def test_a_threshold_on_p_is_compared_at_equal_tau(bench: Bench) -> None:
    ground = Ground.of(bench.traces("draft"), 4)
    # an accept length that no setting has exactly
    base = common.Point(4.0, ground.eagle2_at(10).tau - 0.001, 4.0)
    cells = ground.against(ground.forest.joint_log_prob.exp(), base)
    assert set(cells) == {"setting", "tau", "gamma / EAGLE-2", "missing"}
    beta = cells["setting"]
    assert beta is not None and cells["tau"] is not None and cells["tau"] > base.tau + 0.0005
    kept = ground.forest.joint_log_prob.exp() >= beta
    sweep = Sweep(torch.tensor([beta]), kept.sum(1)[None].short(), (kept & ground.forest.accepted).sum(1)[None].short())
    by_hand = Curve.of(ground.traces, sweep)
    share = float(by_hand.gamma[0] / (by_hand.tau[0] + 1)) / base.per_token
    assert cells["gamma / EAGLE-2"] == pytest.approx(share)


def test_beta_is_the_largest_that_accepts_enough(bench: Bench) -> None:
    classifier, traces = bench.classifier("draft"), bench.traces("draft")

    def at(beta: float) -> Brought:
        return common.served(traces, C2TTree(classifier=classifier, beta=beta, first_k=4, second_k=4, d_max=4))

    wanted = at(0.0).tau / 2
    beta, found = common.beta_at(at, wanted, rounds=12)
    assert found.tau >= wanted > at(beta * 1.01).tau
    assert common.beta_at(at, 100.0)[0] == 0.0


def test_probability_and_acceptance_by_entropy_and_rank(bench: Bench) -> None:
    forest = bench.traces("draft").tree
    found = by_entropy_and_rank(forest)
    inside = (forest.entropy[:, 0] >= 1) & (forest.entropy[:, 0] < 2)
    assert int(found.states[1]) == int(inside.sum()) > 0
    assert int(found.states.sum()) == len(forest)
    assert found.prob[1, 2] == pytest.approx(float(forest.log_prob[inside, 2].exp().mean()))
    assert found.accepted[1, 0] == pytest.approx(float(forest.accepted[inside, 0].float().mean()))


def test_acceptance_by_depth_counts_what_eagle2_verifies(bench: Bench) -> None:
    forest = bench.traces("draft").tree
    verified = candidates(forest, 6)
    assert (verified.sum(1) == 5).all()
    found = accepted_by_depth(forest, verified, 0.2, 0.6)
    prob = forest.joint_log_prob.exp()
    nodes = [
        (row, column)
        for row in range(len(forest))
        for column in range(4)
        if verified[row, column] and 0.2 < prob[row, column] <= 0.6
    ]
    assert found[1] == (len(nodes), sum(bool(forest.accepted[node]) for node in nodes))
    assert found[1][0] > 0


def test_scores_of_a_confusion_matrix() -> None:
    kept = torch.tensor([True, True, True, False, False, False, False, False])
    accepted = torch.tensor([True, False, False, True, False, False, False, False])
    found = Scores.of(kept, accepted)
    assert (found.accuracy, found.precision, found.recall) == (5 / 8, 1 / 3, 1 / 2)
    assert found.f1 == pytest.approx(0.4)
    assert Scores.of(kept[:0], accepted[:0]) == Scores(None, None, None)
    assert Scores.of(~kept, kept).f1 is None


def test_c2t_is_cut_at_a_share_of_the_accepted(bench: Bench) -> None:
    forest = bench.traces("draft").tree
    prob = forest.joint_log_prob.exp()
    kept = kept_at_recall(forest, prob, 0.5)
    hits = int(forest.accepted.sum())
    assert int((kept & forest.accepted).sum()) == -(-hits // 2)
    # P never rises along a path, so its path minimum is itself
    assert torch.equal(kept, prob >= prob[kept & forest.accepted].min())


def test_a_classifiers_surface_is_its_confidence() -> None:
    spec = ClassifierSpec(hidden=1)
    classifier = NodeClassifier(spec).requires_grad_(False)
    classifier.load_state_dict(
        {
            "hidden.weight": torch.tensor([[2.0, 1.0, -0.5]]),
            "hidden.bias": torch.tensor([1.0]),
            "out.weight": torch.tensor([[1.0]]),
            "out.bias": torch.tensor([-2.0]),
        }
    )
    found = surface(classifier, torch.tensor([0.5, 1.0])[:, None], torch.tensor([1.0, 3.0])[None], torch.tensor(2.0))
    # 2 P + H - d / 2 + 1 - 2
    expected = torch.tensor([[0.0, 2.0], [1.0, 3.0]]).sigmoid()
    assert torch.allclose(found, expected)


def test_every_epoch_is_judged_with_its_own_weights(bench: Bench) -> None:
    traces = bench.traces("draft")
    classifier, epochs = common.small_fit(bench.traces("draft", "train"), common.PAPER_RECIPE, seed=1)
    before = {name: value.clone() for name, value in classifier.state_dict().items()}
    found = scores_by_epoch(classifier, epochs, traces)
    assert len(found) == len(epochs) == 10
    assert all(torch.equal(value, before[name]) for name, value in classifier.state_dict().items())
    classifier.load_state_dict(epochs[3].weights)
    assert found[3] == score_trees(classifier, traces.tree)
    assert found[3] != found[9]


def test_what_is_judged_is_not_fitted_on(bench: Bench) -> None:
    kinds = corpora(bench, "eagle3")
    held, train = bench.traces("eagle3"), bench.traces("eagle3", "train")
    assert set(kinds["other held-out files"].prompt.tolist()) == {2, 3}
    assert torch.equal(kinds["training files"].tree.token_ids, train.tree.token_ids)
    assert kinds["novel text"].novel.all() and not kinds["repeated text"].novel.any()
    assert len(kinds["novel text"]) + len(kinds["repeated text"]) == len(train) == len(held)


def test_entropies_over_other_probabilities_are_read_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for top_m in (4, 6):
        found = top_m_traces(bench, "eagle3", top_m)
        assert torch.equal(found.tree.entropy, bench.traces("eagle3").tree.entropy)
    rows = REGISTRY.experiments["c2t-v1-table-6"].findings(bench).rows
    # the same traces stand for every M here; other weights are refused
    assert [row["gamma / all"] for row in rows] == [1.0] * 4
    assert [row["probabilities"] for row in rows] == [6] * 4
    monkeypatch.setattr(pairs, "describe_pair", lambda directory, draft: {"target": "another"})
    with pytest.raises(C2TError, match="other weights"):
        top_m_traces(bench, "eagle3", 4)


def test_lemma_2_is_acceptance_drawn_at_random() -> None:
    for row in lemma_2_rows(seed=3):
        # five standard deviations of a mean of so many draws
        assert abs(row["paper"] - row["ours"]) < 5 * 0.5 / DRAWS**0.5


def test_recent_acceptance_by_hand(make_traces) -> None:
    traces = make_traces(prompts=2, steps=6)
    traces.chain.accepted[:] = False
    traces.chain.accepted[0, :2] = True
    # the first prompt is verified at 0 (2 accepted), 3, 4 and 5; what is not over yet does not count
    found = recent_acceptance(traces, d_max=4)
    expected = [2, 2, 2, (2 + 2) / 2, (2 + 2) / 3, (2 + 2) / 4]
    assert found[:6].tolist() == pytest.approx(expected)
    assert found[6:].tolist() == pytest.approx([2 / (1 + verified) for verified in range(6)])


def test_recent_acceptance_forgets(make_traces) -> None:
    traces = make_traces(prompts=1, steps=20)
    traces.chain.accepted[:] = False
    assert recent_acceptance(traces, 4)[WINDOW:].tolist() == pytest.approx([PRIOR / (WINDOW + 1)] * (20 - WINDOW))


def test_no_prompt_is_fitted_and_judged_on(make_traces) -> None:
    for prompts in (2, 12, 40):
        own, others = halves(make_traces(prompts=prompts, steps=2, layers=2), 15)
        assert not set(own.prompt.tolist()) & set(others.prompt.tolist())
        assert 1 <= len(others.first) <= 10 and len(own.first) == min(15, prompts - 1)


def test_every_kind_is_judged_with_every_classifier(bench) -> None:
    rows = REGISTRY.experiments["c2t-v1-figure-8-kinds"].findings(bench).rows
    assert [(row["judged on"], row["fitted on"]) for row in rows] == [(one, two) for one in KINDS for two in KINDS]


@pytest.mark.slow
def test_beta_rises_with_what_is_left_out(bench, make_traces) -> None:
    # enough that something is learnt
    bench._traces[("eagle3", "train")] = make_traces(prompts=40, steps=20, k=4, layers=5, seed=1)
    rows = REGISTRY.experiments["c2t-v1-negatives"].findings(bench).rows
    assert [row["rejected per accepted"] for row in rows[::2]] == [1.0, 3.0, 10.0, 30.0, 100.0, *["all"] * 3]
    theta = [row["theta"] for row in rows if str(row["epoch by"]).startswith("bce")]
    # the heavier the accepted rows, the more nodes are called accepted, and the higher beta has to be
    assert theta[7] > theta[6] > theta[5]
    settings = [row["setting"] for row in rows if str(row["epoch by"]).startswith("bce")]
    assert settings[7] > settings[6] > settings[5]


def test_printed_gammas_of_v2_are_sums_over_corpora() -> None:
    eagle3 = next(method for method in TABLE_2 if method.name == "E3")
    # thousands of candidates of three models, with C2T and without
    assert eagle3.paper_gamma == pytest.approx((1270 + 2694 + 867) / (1453 + 2816 + 974))
    assert all(len(method.taus) == len(method.taus_c2t) == 18 for method in TABLE_2)


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [("eagle3", "eagle3", "own"), ("eagle1", "eagle3", "same family"), ("draft", "eagle1", "other family")],
)
def test_families_of_drafts(source: str, target: str, kind: str) -> None:
    assert relation(source, target) == kind


def test_table_3_has_both_readings_of_the_failing_token(bench: Bench) -> None:
    rows = {(row["draft"], row["method"]): row for row in REGISTRY.experiments["c2t-v1-table-3"].findings(bench).rows}
    for draft in ("EAGLE-1 head", "EAGLE-3 head", "stand-alone"):
        for method in ("DyMax .3", "DyJoint .08"):
            dropped, kept = rows[draft, method], rows[draft, f"{method}, failing kept"]
            assert dropped["length"] < kept["length"]
            assert dropped["tau"] <= kept["tau"]
            assert dropped["paper tau"] == kept["paper tau"]
