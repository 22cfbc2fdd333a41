"""Fitting: what is learnt, what is sampled, what is chosen, what ends up in the file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from c2t_plugin.classifier import load_classifier
from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.lab import collect, fit
from c2t_plugin.lab.plans import RECIPES, CollectPlan, FitPlan
from c2t_plugin.lab.report import Evaluation, forest_features
from c2t_plugin.lab.rows import parent_rows, share_of_prompts, split_by_prompt, training_rows
from c2t_plugin.lab.scores import NodeScores, auc
from c2t_plugin.lab.training import (
    EPOCHS,
    FIT_RECIPES,
    Epoch,
    FitRecipe,
    choose_epoch,
    new_classifier,
    sample_negatives,
    train,
)
from c2t_plugin.traces import load_traces, save_traces

SCORES = NodeScores(recall=0.0, theta=0.0, auc=0.0, bce=0.0, auc_joint_prob=0.0, recall_joint_prob=0.0)


def separable(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log P, entropy and depth; accepted above a curve in the first two."""
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(rows, 3, generator=generator) * torch.tensor([-8.0, 5.0, 10.0]) + torch.tensor(
        [0.0, 0.0, 1.0]
    )
    return features, features[:, 0] + 2.0 > 0.3 * features[:, 1] ** 2 - 2.0


def fitted(seed: int = 0, rows: int = 4000):
    features, accepted = separable(rows)
    classifier = new_classifier(FIT_RECIPES["default"], features, {}, seed)
    epochs = train(classifier, features, accepted, lambda: SCORES, torch.Generator().manual_seed(seed))
    return classifier, epochs, features, accepted


def test_a_separable_problem_is_learnt() -> None:
    classifier, epochs, features, accepted = fitted(rows=60_000)
    assert len(epochs) == EPOCHS == 10
    # P alone cannot do it: the border is a curve in two features
    assert auc(features[:, 0], accepted) < 0.96
    with torch.no_grad():
        assert auc(classifier(features), accepted) > 0.99


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    runs = [fitted(seed)[1][-1].weights for seed in (1, 1, 2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not torch.equal(runs[0]["out.weight"], runs[2]["out.weight"])


def test_every_epoch_keeps_its_own_weights() -> None:
    epochs = fitted()[1]
    assert not torch.equal(epochs[0].weights["out.weight"], epochs[-1].weights["out.weight"])


@pytest.mark.parametrize(("name", "parameters"), [("default", 241), ("paper", 241), ("extended", 385)])
def test_recipes_have_the_stated_size(name, parameters) -> None:
    recipe = FIT_RECIPES[name]
    classifier = new_classifier(recipe, torch.randn(50, len(recipe.features)), {}, seed=0)
    assert sum(parameter.numel() for parameter in classifier.parameters()) == parameters
    assert classifier.spec.hidden == 48


def test_every_recipe_can_be_asked_for() -> None:
    assert set(RECIPES) == set(FIT_RECIPES)


@pytest.mark.parametrize("hidden", [2, 6, 12])
def test_hidden_units_can_be_chosen(hidden) -> None:
    classifier = new_classifier(replace(FIT_RECIPES["default"], hidden=hidden), torch.randn(50, 3), {}, seed=0)
    assert classifier.spec.hidden == hidden
    assert sum(parameter.numel() for parameter in classifier.parameters()) == 5 * hidden + 1


@pytest.mark.parametrize(("field", "value", "least"), [("hidden", 0, 1), ("chains", -1, 0)])
def test_a_senseless_size_is_refused(field, value, least) -> None:
    with pytest.raises(C2TError, match=f"{field} must be at least {least}"):
        replace(FIT_RECIPES["default"], **{field: value})


def test_the_learning_rate_falls_to_nothing() -> None:
    """With decay, what an epoch changes becomes smaller and smaller; without, it does not."""
    features, accepted = separable(4000)
    moved = {}
    for decay in (True, False):
        classifier = new_classifier(FIT_RECIPES["default"], features, {}, 0)
        epochs = train(classifier, features, accepted, lambda: SCORES, torch.Generator().manual_seed(0), decay=decay)
        weights = [epoch.weights["hidden.weight"] for epoch in epochs]
        moved[decay] = float((weights[-1] - weights[-2]).norm() / (weights[1] - weights[0]).norm())
    assert moved[True] < 0.1 < 0.3 < moved[False]


def test_chains_are_rows_of_their_own(make_traces) -> None:
    traces = make_traces()
    recipe = FIT_RECIPES["extended"]
    features, accepted = training_rows(traces, recipe, 1)
    alone, _ = training_rows(traces, replace(recipe, chains=0), 1)
    assert len(features) - len(alone) == 5 * traces.chain.accepted.numel()
    assert torch.equal(features[: len(alone)], alone)
    assert torch.equal(accepted[len(alone) :], traces.chain.accepted.flatten().repeat(5))
    assert (features[len(alone) :, recipe.features.index("rank")] == 0).all()


def test_sampling_with_a_corrected_prior_keeps_confidences_probabilities(make_traces) -> None:
    traces = make_traces(prompts=60, steps=6)
    share = float(traces.tree.accepted.float().mean())
    found = {}
    for prior in (False, True):
        recipe = replace(FIT_RECIPES["default"], negatives_per_positive=1.0, prior=prior)
        classifier, _, _ = fit.fit(traces, recipe, FitPlan(d_max=4))
        found[prior] = float(classifier.confidence(traces.tree.stats()).mean())
    assert found[True] == pytest.approx(share, rel=0.1)
    assert found[False] > 1.5 * share


def test_weights_with_a_corrected_prior_keep_confidences_probabilities(make_traces) -> None:
    traces = make_traces(prompts=60, steps=6)
    share = float(traces.tree.accepted.float().mean())
    found = {}
    for prior in (False, True):
        recipe = replace(FIT_RECIPES["default"], positive_weight=8.0, prior=prior)
        classifier, _, _ = fit.fit(traces, recipe, FitPlan(d_max=4))
        found[prior] = float(classifier.confidence(traces.tree.stats()).mean())
        assert classifier.spec.training["positive_weight"] == 8.0
    assert found[True] == pytest.approx(share, rel=0.15)
    assert found[False] > 2 * share


def test_parents_are_found_in_trees_and_chains(make_traces) -> None:
    traces, recipe = make_traces(prompts=2, steps=2), replace(FIT_RECIPES["extended"], chains=2)
    features, _ = training_rows(traces, recipe, 1)
    parents = parent_rows(traces, recipe)
    joint, own, depth = (recipe.features.index(name) for name in ("joint_log_prob", "log_prob", "depth"))
    below_root = features[:, depth] == 1
    assert len(parents) == len(features)
    assert torch.equal(parents[below_root], torch.arange(len(features))[below_root])
    # a node's P is its parent's times its own probability
    expected = features[parents][~below_root, joint] + features[~below_root, own]
    torch.testing.assert_close(features[~below_root, joint], expected)
    assert torch.equal(features[parents][~below_root, depth], features[~below_root, depth] - 1)


def test_the_penalty_makes_paths_fall() -> None:
    features, accepted = separable(20_000)
    # every second row is the child of the one before, whatever the two hold
    parents = torch.arange(len(features)) // 2 * 2
    rises = {}
    for weight in (0.0, 10.0):
        classifier = new_classifier(FIT_RECIPES["default"], features, {}, 0)
        train(
            classifier, features, accepted, lambda: SCORES, torch.Generator().manual_seed(0), monotone=weight,
            parents=parents if weight else None,
        )  # fmt: skip
        with torch.no_grad():
            confidence = torch.sigmoid(classifier(features))
        rises[weight] = float((confidence - confidence[parents]).relu().mean())
    assert rises[10.0] < 0.2 * rises[0.0]


def test_a_penalty_without_all_parents_is_refused(make_traces) -> None:
    with pytest.raises(C2TError, match="monotone needs all negatives, got 3"):
        replace(FIT_RECIPES["default"], monotone=1.0, negatives_per_positive=3.0)
    traces = make_traces()
    traces.tree.entropy[::3, 1] = float("nan")
    with pytest.raises(C2TError, match="not finite"):
        fit.fit(traces, replace(FIT_RECIPES["default"], monotone=1.0), FitPlan(d_max=4))


@pytest.mark.parametrize(
    ("field", "value"), [("positive_weight", 0.0), ("positive_weight", float("nan")), ("monotone", -1.0)]
)
def test_a_senseless_weight_is_refused(field, value) -> None:
    with pytest.raises(C2TError, match=field.replace("_", " ")):
        replace(FIT_RECIPES["default"], **{field: value})


def test_calibrating_makes_confidences_true_on_average(make_traces) -> None:
    traces = make_traces(prompts=60)
    recipe = replace(FIT_RECIPES["default"], negatives_per_positive=1.0)
    plain, _, _ = fit.fit(traces, recipe, FitPlan(d_max=4))
    found, _, _ = fit.fit(traces, recipe, FitPlan(d_max=4, calibrate="tree"))
    training = traces[~split_by_prompt(traces.prompt, 0)]
    stats, accepted = training.tree.stats(), float(training.tree.accepted.float().mean())
    # the intercept of a logistic regression makes the means equal
    assert float(found.confidence(stats).mean()) == pytest.approx(accepted, abs=1e-3)
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


def test_scaling_is_that_of_the_training_rows() -> None:
    features = torch.tensor([[1.0, 5.0, 2.0], [3.0, 5.0, 2.5], [5.0, 5.0, 9.0]])
    spec = new_classifier(FIT_RECIPES["default"], features, {}, seed=0).spec
    assert spec.shift == pytest.approx((3.0, 5.0, 4.5))
    # a constant feature is not divided by 0
    assert spec.scale == pytest.approx((2.0, 1.0, float(features[:, 2].std())))
    raw = new_classifier(FIT_RECIPES["paper"], features, {}, seed=0).spec
    assert (raw.shift, raw.scale) == ((0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(("ratio", "negatives"), [(1.0, 50), (0.5, 25), (7.5, 375), (None, 950), (100.0, 950)])
def test_negatives_are_sampled_at_the_ratio(ratio, negatives) -> None:
    accepted = torch.zeros(1000, dtype=torch.bool)
    accepted[::20] = True
    rows = sample_negatives(accepted, ratio, torch.Generator().manual_seed(0))
    assert len(rows.unique()) == len(rows) == 50 + negatives
    assert int(accepted[rows].sum()) == 50


def test_negatives_are_a_random_draw() -> None:
    accepted = torch.arange(2000) < 100
    draws = [sample_negatives(accepted, 5.0, torch.Generator().manual_seed(seed))[100:] for seed in (0, 1)]
    assert not torch.equal(draws[0], draws[1])
    # the mean of 500 of 1,900 rows has a standard deviation of about 21; six of them
    assert abs(float(draws[0].double().mean()) - 1049.5) < 130


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_a_senseless_ratio_is_refused(ratio) -> None:
    with pytest.raises(C2TError, match="positive number"):
        FitRecipe(("entropy",), True, ratio, "bce")


@pytest.mark.parametrize("features", [(), ("entropy", "hidden_state")])
def test_an_unknown_feature_is_refused(features) -> None:
    with pytest.raises(C2TError, match="features must be some of"):
        FitRecipe(features, True, None, "bce")


@pytest.mark.parametrize(
    ("rule", "chosen"),
    # 0.894 is not similar to 0.9, 0.896 is, and has the smaller theta of the two
    [("recall", 3), ("bce", 1)],
)
def test_choice_of_the_epoch(rule, chosen) -> None:
    figures = [(0.894, 0.01, 0.1), (0.9, 0.04, 0.2), (0.896, 0.03, 0.3)]
    epochs = [
        Epoch(i, replace(SCORES, recall=recall, theta=theta, bce=bce), {})
        for i, (recall, theta, bce) in enumerate(figures, start=1)
    ]
    assert choose_epoch(epochs, rule).number == chosen


def test_the_split_takes_whole_prompts(make_traces) -> None:
    prompt = torch.arange(60).repeat_interleave(7)
    aside = split_by_prompt(prompt, seed=0)
    assert len(prompt[aside].unique()) == 3
    assert not set(prompt[aside].tolist()) & set(prompt[~aside].tolist())
    assert not torch.equal(aside, split_by_prompt(prompt, seed=1))
    with pytest.raises(C2TError, match="at least 2"):
        split_by_prompt(torch.zeros(5), seed=0)


@pytest.mark.parametrize("origin", [0, 1])
def test_training_features_are_those_of_serving(make_traces, origin) -> None:
    traces = make_traces()
    classifier, _, _ = fit.fit(traces, FIT_RECIPES["default"], FitPlan(depth_origin=origin, d_max=4))
    features = forest_features(traces.tree, classifier.spec.features, origin)
    assert features[0, 0, 2] == origin
    found = torch.sigmoid(classifier(features))
    assert torch.equal(found, classifier.confidence(traces.tree.stats()))


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
    ],
    ids=str,
)
def test_a_senseless_plan_is_refused(values) -> None:
    with pytest.raises(ConfigError):
        FitPlan(**values)


def test_chains_longer_than_the_traces_are_refused(make_traces) -> None:
    with pytest.raises(C2TError, match="collect deeper"):
        fit.fit(make_traces(layers=3), FIT_RECIPES["default"], FitPlan(d_max=4))


@pytest.mark.parametrize("values", [{"trees": 0}, {"draft": "medusa"}, {"prompts": "test"}], ids=str)
def test_a_senseless_collection_is_refused(values) -> None:
    with pytest.raises(ConfigError):
        CollectPlan(**{"draft": "draft", **values})


COLLECT = ["--k", "3", "--layers", "4", "--top-m", "20", "--new-tokens", "3", "--prompts", "held-out"]


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
