"""Rivals' scores, and the online estimator against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from c2t_plugin.classifier import MIN_LOG_PROB
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.rivals import (
    CHAIN_RIVALS,
    ENTROPY_WEIGHT,
    TEMPERATURE,
    OnlineLogistic,
    joint_prob,
    low_entropy,
    own_logit,
    sharpened,
    tempered,
    token_prob,
)


def drafts(rows: int, positions: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens accepted with the chance sigmoid(0.8 * logit(q) + 1 - position / 2), until one is not."""
    rng = np.random.default_rng(seed)
    prob = rng.uniform(0.05, 0.95, (rows, positions))
    chance = 1 / (1 + np.exp(-(0.8 * np.log(prob / (1 - prob)) + 1 - np.arange(positions) / 2)))
    accepted = np.cumprod(rng.uniform(size=chance.shape) < chance, axis=1)
    return torch.tensor(np.log(prob)).float(), torch.tensor(accepted).bool()


def test_scores_are_what_their_names_say(make_traces) -> None:
    chain = make_traces().chain
    assert torch.equal(joint_prob(chain), chain.joint_log_prob)
    assert torch.equal(token_prob(chain), chain.log_prob)
    assert torch.equal(low_entropy(chain), -chain.entropy)
    tree = make_traces().tree
    # two siblings come from one distribution
    assert torch.equal(low_entropy(tree)[:, 0::2], low_entropy(tree)[:, 1::2])


def test_both_readings_of_the_failing_token_are_there() -> None:
    assert {(rule.score, rule.keeps_failing) for rule in CHAIN_RIVALS} == {
        (joint_prob, False),
        (joint_prob, True),
        (token_prob, False),
        (token_prob, True),
        (low_entropy, False),
        (low_entropy, True),
    }


def test_sharpened_probabilities_by_hand(make_traces) -> None:
    tree = make_traces(prompts=1, steps=3, k=3, layers=3).tree
    found = sharpened(tree, 0.5)
    for row in range(len(tree)):
        for node in range(found.shape[1]):
            expected, at = 0.0, node
            while at >= 0:
                first = at // tree.k * tree.k
                squares = tree.log_prob[row, first : first + tree.k].double().exp() ** 2
                expected += float((squares[at - first] / squares.sum()).log())
                at = int(tree.parent_ids[row, at // tree.k])
            assert found[row, node] == pytest.approx(max(expected, MIN_LOG_PROB), abs=1e-4)
    assert sharpened(tree, 1.0).view(len(tree), -1, 3)[:, 0].exp().sum(1).tolist() == pytest.approx([1.0] * len(tree))


def test_the_tempered_form_is_the_sharpened_one_to_first_order(make_traces) -> None:
    """A whole vocabulary of which every word is a child: near temperature 1 both say the same, but for T."""
    chain = make_traces().chain
    assert tempered(chain).tolist() == pytest.approx(chain.joint_log_prob + 0.2 * chain.path_entropy())
    words = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    entropy = -(words.exp() * words).sum()
    near = 0.999
    exact = (words / near).log_softmax(0)
    assert (near * exact).tolist() == pytest.approx((words + (1 - near) * entropy).tolist(), abs=1e-6)
    assert pytest.approx(1 - TEMPERATURE) == ENTROPY_WEIGHT


def test_own_logit() -> None:
    prob = torch.tensor([0.5, 0.9, 1e-4, 0.0, 1.0], dtype=torch.float64)
    found = own_logit(prob.log())
    assert found[:3].tolist() == pytest.approx([math.log(p / (1 - p)) for p in (0.5, 0.9, 1e-4)])
    assert found[3:].tolist() == [-40.0, 40.0]


def test_the_optimum_is_the_most_likely_one() -> None:
    log_prob, accepted = drafts(3000, 3)
    model = OnlineLogistic(3)
    chain = type("Chain", (), {"log_prob": log_prob, "accepted": accepted, "__len__": lambda self: len(log_prob)})()
    model.fit_whole(chain, 3)
    feature = own_logit(log_prob).numpy()
    label = accepted.numpy()
    reached = np.cumprod(np.concatenate([np.ones((3000, 1)), label[:, :-1]], axis=1), axis=1) > 0

    def loss(x: np.ndarray) -> float:
        z = x[0] * feature + x[1:]
        # the engine's ridge acts on the step and not on the optimum
        return float(np.where(reached, np.logaddexp(0, z) - label * z, 0).sum())

    best = minimize(loss, np.zeros(4), tol=1e-10).x
    # the optimiser's own tolerance on a sum of 3,000 rows
    assert [model.slope, *model.bias.tolist()] == pytest.approx(best.tolist(), abs=2e-3)
    # and it finds what the drafts were made of, within four standard errors
    assert [model.slope, *model.bias.tolist()] == pytest.approx([0.8, 1.0, 0.5, 0.0], abs=0.2)


def test_one_refit_by_a_dense_newton_step() -> None:
    log_prob, accepted = drafts(40, 3, seed=2)
    model = OnlineLogistic(3)
    model.learn(log_prob, accepted)
    gradient, curvature, seen = np.zeros(4), np.zeros((4, 4)), np.zeros(3)
    for row in range(40):
        for position in range(3):
            if position and not accepted[row, position - 1]:
                break
            x = np.zeros(4)
            q = math.exp(float(log_prob[row, position]))
            x[0], x[1 + position] = math.log(q / (1 - q)), 1.0
            predicted = 1 / (1 + math.exp(-(0.5 * x[0] - 0.2)))
            gradient += (float(accepted[row, position]) - predicted) * x
            curvature += predicted * (1 - predicted) * np.outer(x, x)
            seen[position] += 1
    step = np.linalg.solve(curvature + 1e-3 * np.eye(4), gradient)[0] * seen.sum() / (seen.sum() + 50)
    assert model.slope == pytest.approx(0.5 + step, rel=1e-6)
    for position in range(3):
        alone = (gradient[1 + position] - curvature[0, 1 + position] * step) / (
            curvature[1 + position, 1 + position] + 1e-3
        )
        damped = -0.2 + alone * seen[position] / (seen[position] + 50)
        assert float(model.bias[position]) == pytest.approx(damped, rel=1e-6)


def test_a_slope_stays_as_it_is_rather_than_fall_below_zero() -> None:
    log_prob, _ = drafts(500, 2)
    # the surer the draft, the worse
    model = OnlineLogistic(2)
    model.learn(log_prob, log_prob < math.log(0.5))
    assert model.slope == 0.5
    assert not torch.equal(model.bias, torch.full((2,), -0.2, dtype=torch.float64))


def test_a_position_that_was_never_reached_keeps_its_bias() -> None:
    log_prob, accepted = drafts(100, 3)
    model = OnlineLogistic(3)
    model.learn(log_prob, accepted & torch.tensor([True, False, False]))
    assert float(model.bias[2]) == -0.2 != float(model.bias[1])


def test_reading_in_order_refits_every_hundred_steps(make_traces) -> None:
    chain = make_traces(prompts=50, steps=9, seed=1).chain
    by_hand = OnlineLogistic(3)
    for start in (0, 200):
        by_hand.learn(chain.log_prob[start : start + 200, :3], chain.accepted[start : start + 200, :3])
    found = OnlineLogistic(3).fit(chain, 3, batch=2)
    assert found.slope == by_hand.slope and torch.equal(found.bias, by_hand.bias)
    with pytest.raises(C2TError, match="refits after 500 drafts"):
        OnlineLogistic(3).fit(chain, 3, batch=5)


def test_survival_is_the_product_down_the_chain(make_traces) -> None:
    chain = make_traces(prompts=50, steps=9).chain
    model = OnlineLogistic(4).fit_whole(chain, 4, rounds=3)
    each = model.conditional(chain.log_prob)
    found = model.survival(chain).double().exp()
    # float32 logarithms
    assert torch.allclose(found[:, 2], each[:, 0] * each[:, 1] * each[:, 2], rtol=1e-5)
