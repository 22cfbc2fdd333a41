"""Fitting: what a file starts from, what ends up in it, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from c2t_plugin.classifier import load_classifier
from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.lab import collect, fit
from c2t_plugin.lab.plans import CollectPlan, FitPlan
from c2t_plugin.lab.report import Evaluation
from c2t_plugin.lab.rows import share_of_prompts, split_by_prompt
from c2t_plugin.lab.sweeps import path_minimum
from c2t_plugin.lab.training import FIT_RECIPES
from c2t_plugin.traces.file import load_traces, save_traces


@pytest.mark.parametrize(
    ("changes", "near", "above"),
    [({"negatives_per_positive": 1.0}, 0.1, 1.5), ({"positive_weight": 8.0}, 0.15, 2.0)],
    ids=["sampling", "weights"],
)
def test_a_corrected_prior_keeps_confidences_probabilities(make_traces, changes, near, above) -> None:
    traces = make_traces(prompts=60, steps=6)
    share = float(traces.tree.accepted.float().mean())
    found = {}
    for prior in (False, True):
        classifier, _, _ = fit.fit(traces, replace(FIT_RECIPES["default"], prior=prior, **changes), FitPlan(d_max=4))
        found[prior] = float(classifier.confidence(traces.tree.stats()).mean())
        assert classifier.spec.training["positive_weight"] == changes.get("positive_weight", 1.0)
    assert found[True] == pytest.approx(share, rel=near)
    assert found[False] > above * share


def test_a_penalty_without_all_parents_is_refused(make_traces) -> None:
    with pytest.raises(C2TError, match="monotone needs all negatives, got 3"):
        replace(FIT_RECIPES["default"], monotone=1.0, negatives_per_positive=3.0)
    traces = make_traces()
    traces.tree.entropy[::3, 1] = float("nan")
    with pytest.raises(C2TError, match="not finite"):
        fit.fit(traces, replace(FIT_RECIPES["default"], monotone=1.0), FitPlan(d_max=4))


def test_calibrating_makes_confidences_true_on_average(make_traces) -> None:
    traces = make_traces(prompts=60)
    recipe = replace(FIT_RECIPES["default"], negatives_per_positive=1.0)
    plain, _, _ = fit.fit(traces, recipe, FitPlan(d_max=4))
    found, _, _ = fit.fit(traces, recipe, FitPlan(d_max=4, calibrate="tree"))
    training = traces[~split_by_prompt(traces.prompt, 0)]
    stats, accepted = training.tree.stats(), float(training.tree.accepted.float().mean())
    # the intercept of a logistic regression makes the means equal
    lowest = path_minimum(training.tree, found.confidence(stats))
    assert float(lowest.mean()) == pytest.approx(accepted, abs=1e-3)
    assert float(plain.confidence(stats).mean()) > 1.5 * accepted
    # the order stays, but for the rounding of sums
    ordered = found.confidence(stats).flatten()[plain.confidence(stats).flatten().argsort()]
    assert float(ordered.diff().min()) > -1e-5
    assert found.spec.training["calibrated"] == "tree"


def test_calibrating_on_chains_looks_at_chains(make_traces, monkeypatch) -> None:
    traces, seen = make_traces(prompts=10), []
    monkeypatch.setattr(fit, "_calibrated", lambda classifier, forest: seen.append(forest) or classifier)
    for calibrate in ("none", "chain", "tree"):
        fit.fit(traces, FIT_RECIPES["default"], FitPlan(d_max=4, calibrate=calibrate))
    assert [forest.k for forest in seen] == [1, 2]
    assert len(seen[0]) == len(traces) - 5


def test_fine_tuning_starts_from_the_file(make_traces) -> None:
    first, second = make_traces(prompts=30), make_traces(prompts=30, seed=1)
    init, _, _ = fit.fit(first, replace(FIT_RECIPES["extended"], hidden=6), FitPlan(d_max=4, depth_origin=0))
    before = {name: value.clone() for name, value in init.state_dict().items()}
    # so small a rate that nothing moves far
    plan = FitPlan(d_max=4, share=0.1, learning_rate=1e-6)
    tuned, _, _ = fit.fit(second, FIT_RECIPES["default"], plan, init)
    for name in ("features", "shift", "scale", "hidden", "depth_origin"):
        assert getattr(tuned.spec, name) == getattr(init.spec, name)
    assert torch.allclose(tuned.hidden.weight, init.hidden.weight, atol=1e-3)
    assert not torch.equal(tuned.hidden.weight, init.hidden.weight)
    assert all(torch.equal(value, before[name]) for name, value in init.state_dict().items())


def test_fine_tuning_reads_a_tenth_of_the_prompts() -> None:
    prompt = torch.arange(50).repeat_interleave(3)
    chosen = share_of_prompts(prompt, 0.1, seed=0)
    assert len(prompt[chosen].unique()) == 5 and int(chosen.sum()) == 15
    assert int(share_of_prompts(prompt, 1e-6, seed=0).sum()) == 3


def test_fine_tuning_on_another_top_m_is_refused(make_traces) -> None:
    traces = make_traces()
    init, _, _ = fit.fit(traces, FIT_RECIPES["default"], FitPlan(d_max=4))
    other = replace(traces, header={**traces.header, "top_m": 9})
    with pytest.raises(C2TError, match="top_m is 4, the traces' 9"):
        fit.fit(other, FIT_RECIPES["default"], FitPlan(d_max=4), init)


def test_a_fit_says_what_decides_its_meaning(make_traces) -> None:
    recipe = replace(FIT_RECIPES["paper"], negatives_per_positive=3.0)
    spec = fit.fit(make_traces(), recipe, FitPlan(depth_origin=0, d_max=3, static=2, seed=5))[0].spec
    assert spec.features == ("joint_prob", "entropy", "depth")
    assert (spec.depth_origin, spec.top_m, spec.negatives_per_positive) == (0, 4, 3.0)
    assert spec.pair["draft_vocab_size"] == 6
    assert spec.training["run"]["seed"] == 5
    assert spec.training["trees"] == 20


def test_rows_that_are_not_finite_are_dropped(make_traces) -> None:
    traces = make_traces()
    traces.tree.entropy[::3, 1] = float("nan")
    classifier, _, _ = fit.fit(traces, FIT_RECIPES["default"], FitPlan(d_max=4))
    assert all(parameter.isfinite().all() for parameter in classifier.parameters())


@pytest.mark.parametrize(
    "values",
    [
        {"static": 7},
        {"static": 0},
        {"beta": 1.5},
        {"beta": float("nan")},
        {"depth_origin": 2},
        {"share": 0.0},
        {"share": 1.1},
        {"learning_rate": 0.0},
        {"calibrate": "all"},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_a_senseless_plan_is_refused(values) -> None:
    with pytest.raises(ConfigError):
        FitPlan(**values)


def test_chains_longer_than_the_traces_are_refused(make_traces) -> None:
    with pytest.raises(C2TError, match="collect deeper"):
        fit.fit(make_traces(layers=3), FIT_RECIPES["default"], FitPlan(d_max=4))


@pytest.mark.parametrize("values", [{"trees": 0}, {"draft": "medusa"}, {"prompts": "test"}, {"seed": -1}], ids=str)
def test_a_senseless_collection_is_refused(values) -> None:
    with pytest.raises(ConfigError):
        CollectPlan(**{"draft": "draft", **values})


COLLECT = ["--k", "3", "--layers", "4", "--top-m", "20", "--new-tokens", "3", "--prompts", "held-out"]


@pytest.mark.slow
def test_from_a_pair_to_a_classifier_by_command(tiny_pair, tmp_path, capsys) -> None:
    traces, out = tmp_path / "eagle3.traces", tmp_path / "c2t_classifier.safetensors"
    arguments = ["--pair", str(tiny_pair), "--draft", "eagle3", "--trees", "15", "--out", str(traces)]
    assert collect.main([*arguments, *COLLECT]) == 0
    recorded = load_traces(traces)
    # whole prompts: five of three states
    assert len(recorded) == 15
    assert recorded.step.tolist() == [0, 1, 2] * 5
    assert recorded.header["pair"]["draft_vocab_size"] == 300
    again = tmp_path / "again.safetensors"
    for path in (out, again):
        command = [str(traces), "--out", str(path), "--d-max", "4", "--evaluate", str(traces), "--seed", "3"]
        assert fit.main(command) == 0
    classifier = load_classifier(out)
    assert classifier.spec.features == ("joint_log_prob", "entropy", "depth")
    assert classifier.spec.top_m == 20
    assert set(classifier.spec.training["evaluations"]) == {"prompts split off", "eagle3.traces"}
    assert str(tmp_path) not in classifier.spec.to_json()
    for name, value in load_classifier(again).state_dict().items():
        assert torch.equal(value, classifier.state_dict()[name])
    printed = capsys.readouterr().out
    assert "suggested beta" in printed and "static" in printed


@pytest.mark.slow
def test_fine_tuning_by_command(make_traces, tmp_path) -> None:
    save_traces(make_traces(prompts=20), tmp_path / "t")
    first, second = tmp_path / "first", tmp_path / "second"
    common = [str(tmp_path / "t"), "--d-max", "4"]
    assert fit.main([*common, "--recipe", "extended", "--hidden", "6", "--chains", "0", "--out", str(first)]) == 0
    assert fit.main([*common, "--init", str(first), "--out", str(second)]) == 0
    one, two = load_classifier(first).spec, load_classifier(second).spec
    assert (one.hidden, one.training["recipe"], one.training["chains"]) == (6, "extended", 0)
    assert (two.hidden, two.training["recipe"], two.features) == (6, "extended, fine-tuned", one.features)
    # 19 prompts to train on, of which 2, and 1 to evaluate on
    assert (one.training["trees"], two.training["trees"]) == (100, 15)


def test_too_many_trees_for_the_prompts_is_an_error(tiny_pair) -> None:
    with pytest.raises(C2TError, match="held-out prompts are needed"):
        collect.collect(tiny_pair, CollectPlan("draft", trees=1000, prompts="held-out"))


def test_traces_of_another_draft_are_not_evaluated_on(make_traces, tmp_path) -> None:
    one, other = make_traces(), make_traces()
    save_traces(one, tmp_path / "one")
    save_traces(replace(other, header={**other.header, "top_m": 5}), tmp_path / "other")
    with pytest.raises(C2TError, match="different drafts"):
        fit.main(
            [str(tmp_path / "one"), "--out", str(tmp_path / "c"), "--d-max", "4", "--evaluate", str(tmp_path / "other")]
        )


def test_evaluation_holds_the_replay(make_traces) -> None:
    traces = make_traces(prompts=10, steps=6)
    classifier, _, _ = fit.fit(traces, FIT_RECIPES["default"], FitPlan(d_max=4))
    found = Evaluation.of(classifier, traces, 4)
    assert [chain.gamma for chain in found.static] == [1.0, 2.0, 3.0, 4.0]
    taus = [chain.tau for chain in found.cut]
    assert taus == sorted(taus, reverse=True) and taus[0] > taus[-1]
    assert (found.prompts, found.states) == (10, 60)
