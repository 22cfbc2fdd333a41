"""A network that learns what its target accepts, on a stream whose truth is known, and what of it is put in force."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from c2t_kernels.network import FEATURES as ALL
from c2t_kernels.network import NodeStats
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.planner import network_learner as learning
from c2t_plugin.planner.calibration import MOST_OF_ONE, Calibration
from c2t_plugin.planner.network import Adam, Network
from c2t_plugin.planner.network_learner import FIRST, TRIAL, NetworkLearner, Outcomes
from tests.support.core.dispatched import Dispatched

pytestmark = pytest.mark.slow

D_MAX, REQUESTS = 4, 32
FEATURES = ("joint_log_prob", "entropy", "depth", "margin")
WHOLE = torch.full((REQUESTS,), D_MAX)


@pytest.fixture
def classifier() -> NodeClassifier:
    """That knows nothing: whatever it is shown, it is as sure."""
    torch.manual_seed(0)
    made = NodeClassifier(ClassifierSpec(features=FEATURES, shift=(-1.5, 1.5, 2.0, 1.5), scale=(1.0,) * 4, hidden=16))
    torch.nn.init.zeros_(made.out.weight)
    torch.nn.init.zeros_(made.out.bias)
    return made.eval().requires_grad_(False)


def drawn(step: int) -> tuple[Tensor, Tensor]:
    """(REQUESTS, D_MAX, 3) log probabilities, entropies and margins, and the chance of each token. It depends on the
    draft's entropy as no calibration of a probability can hold: what is neither low nor high is accepted."""
    chance = torch.Generator().manual_seed(step)
    stats = torch.rand(REQUESTS, D_MAX, 3, generator=chance) * torch.tensor([-1.0, 3.0, 3.0])
    stats[..., 1] = stats[:, :1, 1]
    return stats, torch.where((stats[..., 1] - 1.5).abs() < 0.75, 0.9, 0.3)


def accepted(step: int, contrary: bool = False) -> Tensor:
    """(REQUESTS,) tokens."""
    _, chance = drawn(step)
    hits = torch.rand(REQUESTS, D_MAX, generator=torch.Generator().manual_seed(10**6 + step)) < chance
    found = hits.long().cumprod(1).sum(1)
    return D_MAX - found if contrary else found


def serve(learner: NetworkLearner, steps: range, contrary: Callable[[int], bool] = lambda step: False) -> None:
    for step in steps:
        learner.observe(drawn(step)[0], WHOLE, accepted(step, contrary(step)))
        learner.train()
        learner.settle()


def nll(meant: Callable[[Tensor], Tensor]) -> float:
    """Nats a token on other drafts. meant: statistics -> chances."""
    lost = []
    for step in range(20_000, 20_050):
        chance = meant(drawn(step)[0]).clamp(1e-6, 1 - 1e-6)
        hit = torch.arange(D_MAX) < accepted(step)[:, None]
        lost.append(-torch.where(hit, chance, 1 - chance).log().mean())
    return float(torch.stack(lost).mean())


def of(learner: NetworkLearner) -> float:
    return nll(lambda stats: learner(learner.confidence(stats), stats[..., 0]))


def calibrated(classifier: NodeClassifier, steps: range) -> float:
    """What a calibration alone has of the same stream."""
    fixed, calibration = NetworkLearner(classifier, D_MAX, background=False), Calibration(D_MAX)
    for step in steps:
        stats, _ = drawn(step)
        calibration.observe(fixed.confidence(stats), WHOLE, accepted(step), (), stats[..., 0])
    return nll(lambda stats: calibration(fixed.confidence(stats), stats[..., 0]))


def test_the_gradient_and_the_confidence_are_torchs(classifier: NodeClassifier):
    torch.manual_seed(1)
    torch.nn.init.normal_(classifier.out.weight)
    classifier.requires_grad_(True)
    features, hits = torch.randn(50, 4), torch.rand(50) < 0.4
    scaled = (features - classifier.shift) / classifier.scale
    logits = classifier(features)
    cross_entropy(logits, hits.float()).backward()
    network = Network.of(classifier)
    found = network.gradient(scaled.numpy(), hits.numpy())
    expected = (classifier.hidden.weight, classifier.hidden.bias, classifier.out.weight, classifier.out.bias)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs.grad.numpy().reshape(mine.shape), rtol=1e-4, atol=1e-6)
    sure = torch.sigmoid(logits).detach().numpy()
    np.testing.assert_allclose(network.confidence(scaled.numpy()), sure, rtol=1e-5, atol=1e-6)


def test_adam_is_torchs(classifier: NodeClassifier):
    network, chance = Network.of(classifier), np.random.default_rng(0)
    twins = [torch.from_numpy(each.copy()).requires_grad_() for each in network]
    optimiser, adam = torch.optim.Adam(twins, lr=0.01), Adam(network, 0.01)
    for _ in range(5):
        gradient = Network(*(chance.normal(size=each.shape).astype(np.float32) for each in network))
        for twin, slope in zip(twins, gradient, strict=True):
            twin.grad = torch.from_numpy(slope)
        optimiser.step()
        adam.step(network, gradient)
    for mine, twin in zip(network, twins, strict=True):
        np.testing.assert_allclose(mine, twin.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("origin", [0, 1])
def test_features_are_the_classifiers_own(origin: int):
    torch.manual_seed(2)
    n = len(ALL)
    spec = ClassifierSpec(ALL, tuple(0.1 * i for i in range(n)), tuple(1.0 + i for i in range(n)), depth_origin=origin)
    classifier, (stats, _) = NodeClassifier(spec).requires_grad_(False), drawn(0)
    log_prob, entropy, margin = stats.unbind(-1)
    depth = torch.arange(1.0, 1 + D_MAX).expand(REQUESTS, -1)
    node = NodeStats(
        joint_log_prob=log_prob.cumsum(1),
        log_prob=log_prob,
        entropy=entropy,
        depth=depth,
        rank=torch.zeros_like(depth),
        margin=margin,
        path_entropy=entropy.cumsum(1),
        # of distributions whose most probable tokens these are
        leading_log_prob=log_prob,
    )
    found = NetworkLearner(classifier, D_MAX, background=False).confidence(stats)
    torch.testing.assert_close(found, classifier.confidence(node), atol=1e-5, rtol=1e-5)


def test_it_learns_what_no_calibration_can_hold(classifier: NodeClassifier):
    steps = range(250)
    learner = NetworkLearner(classifier, D_MAX, background=False)
    serve(learner, steps)
    assert learner.swaps > 0
    assert of(learner) < calibrated(classifier, steps) - 0.05


def test_a_cut_by_confidence_does_not_bend_it(classifier: NodeClassifier):
    """Verified are tokens that are sure enough: what is learnt of them is no worse."""
    whole, cut = (NetworkLearner(classifier, D_MAX, background=False) for _ in range(2))
    for step in range(250):
        stats, _ = drawn(step)
        sure = cut(cut.confidence(stats), stats[..., 0])
        # a tenth is verified whole, as a planner that probes does
        kept = (sure >= 0.3).long().cumprod(1).sum(1) if step % 10 else WHOLE
        for learner, verified in ((whole, WHOLE), (cut, kept)):
            learner.observe(stats, verified, accepted(step).minimum(verified))
            learner.train()
            learner.settle()
    assert of(cut) < of(whole) + 0.01


def test_only_settling_puts_something_in_force(classifier: NodeClassifier):
    learner, told = NetworkLearner(classifier, D_MAX, background=False), list[Network]()
    learner.follow(told.append)
    assert told.pop() is learner.network
    before = [each.copy() for each in learner.network]
    for step in range(125):
        learner.observe(drawn(step)[0], WHOLE, accepted(step))
        learner.train()
    assert learner.swaps == 0 and all(map(np.array_equal, learner.network, before))
    learner.settle()
    assert learner.swaps == 1 and told == [learner.network]
    assert not all(map(np.array_equal, learner.network, before))
    learner.settle()
    assert learner.swaps == len(told) == 1


def test_what_is_in_force_is_not_trained_on(classifier: NodeClassifier):
    learner = NetworkLearner(classifier, D_MAX, background=False)
    for step in range(100):
        kept = [each.copy() for each in learner.network]
        learner.observe(drawn(step)[0], WHOLE, accepted(step))
        learner.train()
        assert all(map(np.array_equal, learner.network, kept))
        learner.settle()
    assert learner.swaps > 0 and learner.batches > learning.BATCHES


def test_one_that_foretells_worse_is_thrown_away(classifier: NodeClassifier, monkeypatch: pytest.MonkeyPatch):
    learner = NetworkLearner(classifier, D_MAX, background=False)
    serve(learner, range(125))
    good, swaps = of(learner), learner.swaps
    spoilt = Network(*(-3 * each for each in learner.network))
    # trained are these, whatever the outcomes
    monkeypatch.setattr(learner, "_round", lambda rest: _hand_over(learner, spoilt))
    for step in range(125, 125 + 3 * TRIAL // REQUESTS):
        discarded = learner.discarded
        serve(learner, range(step, step + 1))
        # training begins anew from what is in force
        assert learner.discarded == discarded or all(map(np.array_equal, learner._candidate, learner.network))
    # one that had been trained before may have been in its trial
    assert learner.discarded > 0 and learner.swaps <= swaps + 1
    assert of(learner) == pytest.approx(good, abs=0.03)


def _hand_over(learner: NetworkLearner, network: Network) -> bool:
    if learner.due.is_set():
        learner._candidate = network.copy()
        learner._trained = network.copy()
        learner.due.clear()
    return True


def test_a_poisoned_tenth_does_not_undo_it(classifier: NodeClassifier):
    clean, poisoned = (NetworkLearner(classifier, D_MAX, background=False) for _ in range(2))
    serve(clean, range(250))
    serve(poisoned, range(250), contrary=lambda step: step % 10 == 0)
    assert of(poisoned) < calibrated(classifier, range(250))
    assert of(poisoned) < of(clean) + 0.05


def test_the_outcome_of_a_step_changes_later_steps_only(classifier: NodeClassifier):
    """What two learners make of drafts is the same until outcomes that differ are told, then no longer."""
    one, other = (NetworkLearner(classifier, D_MAX, background=False) for _ in range(2))
    for step in range(100):
        stats, _ = drawn(step)
        meant = [each(each.confidence(stats), stats[..., 0]) for each in (one, other)]
        assert torch.equal(*meant) or step > 50
        serve(one, range(step, step + 1))
        serve(other, range(step, step + 1), contrary=lambda step: step >= 50)
    assert not torch.equal(*meant)


def test_tokens_that_were_not_verified_and_those_without_statistics_are_no_evidence(classifier: NodeClassifier):
    learner = NetworkLearner(classifier, D_MAX, background=False)
    stats, _ = drawn(0)
    stats[2, 1, 1] = torch.nan
    verified = torch.tensor([0, 2, *[4] * (REQUESTS - 2)])
    learner.observe(stats, verified, torch.minimum(verified, torch.tensor(1)))
    known = learner.outcomes._known[: REQUESTS - 1]
    assert known[0].tolist() == [True, True, False, False]
    assert known[1].tolist() == [True, False, True, True]
    assert learner.outcomes._hits[: REQUESTS - 1, 0].all() and not learner.outcomes._hits[: REQUESTS - 1, 1:].any()
    assert learner.confidence(stats)[2].isnan().tolist() == [False, True, False, False]


def test_no_request_has_more_than_its_share(classifier: NodeClassifier):
    learner = NetworkLearner(classifier, D_MAX, background=False)
    for step in range(2 * MOST_OF_ONE // REQUESTS):
        learner.observe(drawn(step)[0], WHOLE, accepted(step), ["flood"] * REQUESTS)
    assert learner.outcomes.count == MOST_OF_ONE
    # nor after a swap, which brings another calibration
    for step in range(250):
        owners = ["flood", *[(step, row) for row in range(1, REQUESTS)]]
        learner.observe(drawn(step)[0], WHOLE, accepted(step), owners)
        learner.train()
        learner.settle()
        assert learner.calibration._held["flood"] <= MOST_OF_ONE
    assert learner.swaps > 0


def test_counts_go_on_over_a_swap(classifier: NodeClassifier):
    learner, seen = NetworkLearner(classifier, D_MAX, background=False), []
    for step in range(150):
        serve(learner, range(step, step + 1))
        seen.append((learner.state()["seen"], learner.fits))
    assert learner.swaps > 0
    assert all(a <= b for before, after in pairwise(seen) for a, b in zip(before, after, strict=True))
    assert seen[-1][0] == 150 * REQUESTS * D_MAX


def test_the_ring_is_bounded_and_holds_the_newest():
    ring = Outcomes(D_MAX, 4, limit=40_000)
    assert ring.nbytes <= 40_000 and ring.rows >= learning.ROWS
    for number in range(3 * ring.rows):
        features = np.full((1, D_MAX, 4), number, dtype=np.float32)
        ring.add(features, np.ones((1, D_MAX), dtype=bool), np.zeros((1, D_MAX), dtype=bool))
    assert len(ring) == ring.rows and ring.count == 3 * ring.rows
    features, _ = ring.drawn(np.random.default_rng(0))
    assert features.min() >= 2 * ring.rows


def test_a_shorter_draft_leaves_nothing_of_a_longer_one_in_its_row():
    ring = Outcomes(D_MAX, 1, limit=1)
    every = np.ones((ring.rows, D_MAX), dtype=bool)
    ring.add(np.ones((ring.rows, D_MAX, 1), dtype=np.float32), every, every)
    ring.add(np.zeros((ring.rows, 1, 1), dtype=np.float32), every[:, :1], every[:, :1])
    features, hits = ring.drawn(np.random.default_rng(0))
    assert len(hits) == learning.ROWS and not features.any()


def test_a_thread_trains_what_was_served(classifier: NodeClassifier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learning, "SHARE", 0.5)
    learner = NetworkLearner(classifier, D_MAX)
    waiting = threading.Event()
    for step in range(4_000):
        learner.observe(drawn(step % 250)[0], WHOLE, accepted(step % 250))
        learner.settle()
        if learner.due.is_set():
            waiting.wait(0.01)
        if learner.swaps:
            break
    assert learner.swaps == 1 and learner.batches >= learning.BATCHES
    learner.failed = True


def test_it_rests_99_times_as_long_as_it_worked(classifier: NodeClassifier, monkeypatch: pytest.MonkeyPatch):
    """Seconds of its thread, after each minibatch."""
    learner = NetworkLearner(classifier, D_MAX, background=False)
    for step in range(FIRST // REQUESTS):
        learner.observe(drawn(step)[0], WHOLE, accepted(step))
    worked, rested, clock = list[float](), list[float](), [0.0]

    def work() -> None:
        worked.append(0.001 * (1 + len(worked) % 7))
        clock[0] += worked[-1]

    def sleep(seconds: float) -> None:
        rested.append(seconds)
        # the thread ends with this round
        learner.failed = len(rested) == learning.BATCHES

    monkeypatch.setattr(learner, "_batch", work)
    monkeypatch.setattr(learning, "time", SimpleNamespace(thread_time=lambda: clock[0], sleep=sleep))
    learner._trains()
    assert len(worked) == learning.BATCHES
    assert rested == pytest.approx([99 * seconds for seconds in worked])


def test_training_that_fails_says_so_once_and_serving_goes_on(
    classifier: NodeClassifier, caplog: pytest.LogCaptureFixture
):
    learner = NetworkLearner(classifier, D_MAX, background=False)
    learner._candidate.out_bias[:] = np.nan
    serve(learner, range(4 * FIRST // REQUESTS))
    assert learner.failed and learner.swaps == 0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert learner.confidence(drawn(0)[0]).isfinite().all()
    assert learner.state()["seen"] == 4 * FIRST * D_MAX


def test_the_state_is_told_as_json(classifier: NodeClassifier):
    learner = NetworkLearner(classifier, D_MAX, background=False)
    assert learner.state()["network"] == {"swaps": 0, "discarded": 0, "batches": 0, "drafts": 0, "gain": None}
    serve(learner, range(100))
    told = json.loads(json.dumps(learner.state()))
    assert told["network"]["drafts"] == 100 * REQUESTS and told["network"]["swaps"] == learner.swaps > 0
    assert told["network"]["gain"] is not None and told["network"]["batches"] % learning.BATCHES == 0


def test_the_classifier_pulls_where_little_is_known(classifier: NodeClassifier, monkeypatch: pytest.MonkeyPatch):
    away = []
    for tokens in (10.0, 1e6):
        monkeypatch.setattr(learning, "PRIOR_TOKENS", tokens)
        learner = NetworkLearner(classifier, D_MAX, background=False)
        serve(learner, range(FIRST // REQUESTS + 1))
        away.append(sum(float(np.abs(a - b).sum()) for a, b in zip(learner._candidate, learner._prior, strict=True)))
    assert away[1] < 0.2 * away[0]


def test_a_round_asks_torch_for_nothing(classifier: NodeClassifier):
    """Whose operations would have a team of OpenMP of the thread's own, which slows down all others."""
    learner = NetworkLearner(classifier, D_MAX, background=False)
    for step in range(2 * FIRST // REQUESTS):
        learner.observe(drawn(step)[0], WHOLE, accepted(step))
    with Dispatched() as dispatched:
        assert learner.train()
    assert dispatched.computed == [] and learner.batches > 10
