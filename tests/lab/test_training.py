"""Training: what is learnt, what is sampled, what is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from c2t_plugin.errors import C2TError
from c2t_plugin.lab import fit
from c2t_plugin.lab.plans import RECIPES, FitPlan
from c2t_plugin.lab.report import forest_features
from c2t_plugin.lab.rows import parent_rows, split_by_prompt, training_rows
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


@pytest.mark.parametrize(("name", "parameters"), [("default", 241), ("paper", 241), ("extended", 433)])
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


@pytest.mark.parametrize(
    ("field", "value"), [("positive_weight", 0.0), ("positive_weight", float("nan")), ("monotone", -1.0)]
)
def test_a_senseless_weight_is_refused(field, value) -> None:
    with pytest.raises(C2TError, match=field.replace("_", " ")):
        replace(FIT_RECIPES["default"], **{field: value})


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
