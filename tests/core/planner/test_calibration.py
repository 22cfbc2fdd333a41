"""Confidences that mean what they turn out to mean, on streams whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, logsigmoid

from c2t_plugin.planner.calibration import (
    FIT_EVERY,
    MOST_OF_ONE,
    STEPS,
    WINDOW,
    Calibration,
)
from c2t_plugin.planner.fitting import MEMORY, Evidence, fitted, prior_of
from c2t_plugin.planner.fitting import judged as verdict_of
from c2t_plugin.planner.learnt import Learnt
from c2t_plugin.planner.told import auc, joint
from tests.support.core.dispatched import Dispatched

D_MAX, REQUESTS = 4, 4
SLOPE, OWN, OFFSETS = 1.6, 0.5, torch.tensor([-0.2, -0.8, -1.0, -1.5], dtype=torch.float64)
TRUE = Learnt(SLOPE, OWN, OFFSETS)


class Stream(NamedTuple):
    """(steps, REQUESTS, D_MAX) each: confidences, the draft's own log probabilities, and each token's true chance if
    all before it are accepted."""

    confidence: Tensor
    log_prob: Tensor
    truth: Tensor

    @classmethod
    def drawn(cls, steps: int, seed: int) -> Stream:
        shape, chance = (2, steps, REQUESTS, D_MAX), torch.Generator().manual_seed(seed)
        given, own = torch.randn(shape, generator=chance, dtype=torch.float64) + 0.7
        truth = torch.sigmoid(SLOPE * given + OWN * own + OFFSETS)
        return cls(torch.sigmoid(given).cumprod(-1), logsigmoid(own), truth)

    def accepted(self, step: int) -> Tensor:
        """(REQUESTS,) tokens: each with its own chance, as many as come before the first refusal."""
        drawn = torch.rand(REQUESTS, D_MAX, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return (drawn < self.truth[step]).long().cumprod(-1).sum(-1)


def taught(steps: int, beta: float = 0.0, poison: int | None = None) -> Calibration:
    """By a stream. beta: verified are tokens of such confidence. poison: every so many steps say the contrary."""
    calibration, stream = Calibration(D_MAX), Stream.drawn(steps, seed=1)
    for step, (confidence, log_prob) in enumerate(zip(stream.confidence, stream.log_prob, strict=True)):
        verified, accepted = (confidence >= beta).sum(-1), stream.accepted(step)
        if poison and not step % poison:
            accepted = D_MAX - accepted
        calibration.observe(confidence, verified, accepted.minimum(verified), log_prob=log_prob)
    return calibration


def nll(predicted: Tensor, truth: Tensor) -> float:
    return float(binary_cross_entropy(predicted.clamp(0, 1), truth))


def judged(calibration: Calibration) -> tuple[float, float, float]:
    """Nats a token on another stream: of the classifier, of what was learnt, of the truth."""
    stream = Stream.drawn(500, seed=2)
    rows = stream.confidence.view(-1, D_MAX), stream.log_prob.view(-1, D_MAX)
    truth = stream.truth.view(-1, D_MAX).cumprod(1)
    return nll(rows[0], truth), nll(calibration(*rows), truth), nll(truth, truth)


def test_without_evidence_it_changes_nothing():
    confidence = torch.tensor([[0.9, 0.5, torch.nan, 0.0]])
    assert Calibration(D_MAX)(confidence).equal(confidence.double()) is False  # NaN equals nothing
    assert Calibration(D_MAX)(confidence).nan_to_num(2.0).tolist() == confidence.double().nan_to_num(2.0).tolist()


def test_what_is_not_known_stays_so():
    confidence = torch.tensor([[0.9, 0.5, torch.nan, 0.2]])
    found = taught(100)(confidence, torch.tensor([[-0.1, torch.nan, -0.2, -torch.inf]]))
    assert found.isnan().tolist() == confidence.isnan().tolist()


def test_it_finds_slope_and_offsets():
    learnt = taught(2000).learnt
    assert (learnt.slope, learnt.own) == (pytest.approx(SLOPE, abs=0.2), pytest.approx(OWN, abs=0.15))
    assert learnt.offsets.tolist() == pytest.approx(OFFSETS.tolist(), abs=0.35)


@pytest.mark.parametrize(("steps", "missed"), [(32, 0.5), (128, 0.2), (1024, 0.05)])
def test_it_predicts_better_than_what_it_started_from(steps: int, missed: float):
    before, after, best = judged(taught(steps))
    assert best < after < before
    assert after - best < missed * (before - best)


def test_it_does_without_the_drafts_own_probabilities():
    calibration, stream = Calibration(D_MAX), Stream.drawn(1000, seed=1)
    for step, confidence in enumerate(stream.confidence):
        calibration.observe(confidence, torch.full((REQUESTS,), D_MAX), stream.accepted(step))
    assert calibration.learnt.own == 0.0 and calibration.learnt.slope > 1.2


def test_verified_tokens_down_to_the_first_refusal_are_evidence():
    calibration = Calibration(D_MAX)
    calibration.observe(torch.full((3, D_MAX), 0.7), torch.tensor([1, 3, 0]), torch.tensor([0, 1, 0]))
    assert calibration.seen == 4
    known, hits, expected = calibration.window()
    assert known.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert hits.astype(int).tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    plain, features = Learnt.nothing(D_MAX), calibration._features[:2]
    found = verdict_of(Evidence(plain, plain, plain, 4, 2, (), features, known, hits, expected)).learnt
    reached = np.array([[1, 0, 0, 0], [1, 1, 0, 0]], dtype=bool)
    by_hand = fitted(plain, prior_of(plain), features, reached, hits, 4)
    assert found.weights.tolist() == by_hand.weights.tolist()


def test_confidences_that_say_nothing_do_no_harm():
    """Of an untrained classifier, which has each token as likely as all before it: the fit has far to go."""
    calibration, stream = Calibration(D_MAX), Stream.drawn(200, seed=1)
    flat = torch.full((REQUESTS, D_MAX), 0.5)
    for step, log_prob in enumerate(stream.log_prob):
        calibration.observe(flat, torch.full((REQUESTS,), D_MAX), stream.accepted(step), log_prob=log_prob)
    (classifier, learnt), offsets = calibration.state()["nll"], calibration.learnt.offsets
    assert learnt < classifier and calibration.discarded == 0
    # its optimum is that of all drafts at once, whatever came in between
    found = calibration.learnt
    known, _, _ = calibration.window()
    again = fitted(found, found.precision, np.zeros((0, D_MAX, 2)), known[:0], known[:0], 0)
    assert (again.offsets - offsets).abs().max() < 1e-6


def test_a_cut_by_confidence_does_not_bend_it():
    """What is verified is chosen by confidence: the fit is the same within its error."""
    found = [taught(2000, beta).learnt.weights for beta in (0.0, 0.4)]
    assert np.abs(found[0] - found[1])[:4].max() < 0.3


def test_tokens_without_a_confidence_are_no_evidence():
    calibration = Calibration(D_MAX)
    calibration.observe(torch.full((1, D_MAX), torch.nan), torch.tensor([D_MAX]), torch.tensor([0]))
    assert calibration.seen == 0


def test_it_follows_the_traffic():
    calibration = taught(MEMORY // 4 // REQUESTS)
    for step in range(2 * MEMORY // 8):
        confidence = torch.full((8, 1), 0.5)
        calibration.observe(confidence, torch.ones(8, dtype=torch.long), torch.tensor([int(step % 10 < 1)] * 8))
    assert float(calibration(torch.tensor([[0.5]]))) == pytest.approx(0.1, abs=0.05)


def test_a_turn_is_followed_at_once_where_the_classifier_knew_better():
    """After as many drafts as are remembered, a fit or two, and not a window, are enough."""
    calibration, stream = Calibration(D_MAX), Stream.drawn(1200, seed=1)
    for step in range(len(stream.confidence)):
        turned = step >= 1100
        accepted = stream.accepted(step) if turned else D_MAX - stream.accepted(step)
        given = stream.confidence[step], torch.full((REQUESTS,), D_MAX), accepted
        calibration.observe(*given, log_prob=stream.log_prob[step])
        if step == 1099:
            before, astray, _ = judged(calibration)
    assert astray > 1.2 * before
    assert judged(calibration)[1] < before


def test_it_follows_slow_changes_after_a_long_time():
    """Of which none makes the classifier's own confidence the better one."""
    calibration, ones = Calibration(1), torch.ones(10, dtype=torch.long)
    for share, steps in ((9, 4 * MEMORY // 10), (7, 2 * MEMORY // 10)):
        for _ in range(steps):
            calibration.observe(torch.full((10, 1), 0.2), ones, (torch.arange(10) < share).long())
    assert float(calibration(torch.tensor([[0.2]]))) == pytest.approx(0.7, abs=0.06)


def test_large_batches_fit_no_more_often_than_every_few_steps():
    calibration, rows = Calibration(1), 2 * FIT_EVERY
    for _ in range(WINDOW // rows + 5 * STEPS):
        ones = torch.ones(rows, dtype=torch.long)
        calibration.observe(torch.full((rows, 1), 0.5), ones, (torch.arange(rows) % 3 > 0).long())
    assert 4 <= calibration.fits - WINDOW // rows <= 6


def test_a_poisoned_tenth_does_not_undo_it():
    before, clean, best = judged(taught(1000))
    poisoned = judged(taught(1000, poison=10))[1]
    assert clean < poisoned < before
    assert poisoned - best < 0.5 * (before - best)


def test_what_predicts_worse_than_the_classifier_is_thrown_away():
    calibration = Calibration(1)
    lots = torch.full((FIT_EVERY, 1), 0.5)
    ones = torch.ones(FIT_EVERY, dtype=torch.long)
    for _ in range(3):
        calibration.observe(lots, ones, ones)
    assert float(calibration(lots[:1])) > 0.9
    calibration.observe(lots, ones, 0 * ones)
    # by chance the window still says otherwise: what was learnt from it is not believed
    assert float(calibration(lots[:1])) == 0.5
    assert calibration.discarded == 1
    raw, fitted = calibration.state()["nll"]
    assert fitted > raw


def test_a_chain_that_is_always_accepted_stays_finite():
    calibration = Calibration(D_MAX)
    for _ in range(200):
        calibration.observe(torch.ones(8, D_MAX), torch.full((8,), D_MAX), torch.full((8,), D_MAX))
    assert calibration(torch.ones(1, D_MAX)).isfinite().all()
    assert calibration.state()["seen"] == 200 * 8 * D_MAX


def test_the_one_before_holds_again_where_it_predicted_better():
    calibration, stream = taught(1000), Stream.drawn(200, seed=5)
    before = calibration._before = calibration.learnt
    calibration.learnt = before._replace(offsets=before.offsets - 3.0)
    for step in range(FIT_EVERY // REQUESTS):
        accepted = stream.accepted(step)
        calibration.observe(
            stream.confidence[step], torch.full((REQUESTS,), D_MAX), accepted, log_prob=stream.log_prob[step]
        )
        if calibration.discarded:
            break
    assert calibration.discarded == 1 and calibration.learnt is before


def after(chance: float, tokens: int, *, trusted: bool) -> float:
    """What a confidence of a half is taken for after so many tokens that are accepted with this chance."""
    calibration, drawn = Calibration(1, trusted=trusted), torch.Generator().manual_seed(0)
    for _ in range(tokens // 8):
        accepted = (torch.rand(8, generator=drawn) < chance).long()
        calibration.observe(torch.full((8, 1), 0.5), torch.ones(8, dtype=torch.long), accepted)
    return float(calibration(torch.tensor([[0.5]])))


def test_a_classifier_of_this_very_pair_is_not_doubted_for_a_few_outcomes():
    assert after(0.2, 64, trusted=False) == pytest.approx(0.2, abs=0.1)
    assert after(0.2, 64, trusted=True) > 0.4


def test_nor_is_it_believed_against_many():
    assert after(0.2, 4096, trusted=True) == pytest.approx(0.2, abs=0.05)


def test_what_is_thrown_away_leaves_a_classifier_of_this_very_pair_believed():
    calibration, ones = Calibration(1, trusted=True), torch.ones(FIT_EVERY, dtype=torch.long)
    half, mixed = torch.full((FIT_EVERY, 1), 0.5), torch.arange(FIT_EVERY) % 2
    for _ in range(2 * WINDOW // FIT_EVERY):
        calibration.observe(half, ones, ones)
    assert calibration.discarded == 0 and calibration.in_force is not None
    for _ in range(WINDOW // FIT_EVERY):
        calibration.observe(half, ones, mixed)
        if calibration.in_force is None:
            break
    assert calibration.in_force is None and calibration.learnt.precision is not None


def test_no_request_has_more_than_its_share_of_the_window():
    calibration, one = Calibration(1), torch.ones(1, dtype=torch.long)
    for step in range(2 * WINDOW):
        rows = 1 + step % 2
        owners = ["flood", step // 8][:rows]
        calibration.observe(torch.full((rows, 1), 0.5), one.expand(rows), 0 * one.expand(rows), owners)
        assert calibration._held["flood"] <= MOST_OF_ONE
    # what left the window is forgotten, so that its share is free again
    assert len(calibration._entered) == sum(calibration._held.values()) == WINDOW
    assert MOST_OF_ONE < calibration.seen - WINDOW < 3 * MOST_OF_ONE
    alone = Calibration(1)
    for _ in range(2 * WINDOW):
        alone.observe(torch.full((1, 1), 0.5), one, one, ["flood"])
    assert alone.seen == MOST_OF_ONE


def test_it_goes_on_from_what_another_has_learnt():
    calibration = Calibration(D_MAX, start=TRUE._replace(seen=10_000))
    confidence, log_prob = torch.tensor([[0.7, 0.5, 0.3, 0.2]]), torch.tensor([[-0.1, -0.3, -0.7, -1.0]])
    given = confidence.double() / torch.tensor([[1.0, 0.7, 0.5, 0.3]], dtype=torch.float64)
    own = torch.logit(log_prob.double().exp())
    expected = torch.sigmoid(SLOPE * torch.logit(given) + OWN * own + OFFSETS).cumprod(1)
    assert calibration(confidence, log_prob).tolist()[0] == pytest.approx(expected.tolist()[0], abs=1e-6)
    assert calibration.seen == 10_000
    # some drafts by chance do not undo it
    calibration.observe(torch.full((16, D_MAX), 0.5), torch.full((16,), D_MAX), torch.full((16,), 1))
    assert calibration.fits == 1
    assert (calibration.learnt.offsets - OFFSETS).abs().max() < 0.5
    assert calibration.learnt.seen == 10_064


def test_what_does_not_hold_here_is_thrown_away():
    start = Learnt(1.0, 0.0, torch.tensor([4.0], dtype=torch.float64), seen=10_000)
    calibration, ones = Calibration(1, start=start), torch.ones(FIT_EVERY, dtype=torch.long)
    for _ in range(6):
        calibration.observe(torch.full((FIT_EVERY, 1), 0.5), ones, 0 * ones)
    assert calibration.discarded >= 1
    assert float(calibration(torch.tensor([[0.5]]))) < 0.1


def test_a_turn_of_the_traffic_is_counted():
    rows = FIT_EVERY // STEPS
    calibration, half, ones = Calibration(1), torch.full((rows, 1), 0.5), torch.ones(rows, dtype=torch.long)
    mixed = torch.arange(rows) % 2
    # what the classifier says does not hold, then it does
    for _ in range(2 * WINDOW // rows):
        calibration.observe(half, ones, ones)
    assert (calibration.discarded, calibration.turns) == (0, 0) and calibration.learnt is not calibration._plain
    for _ in range(4 * STEPS):
        calibration.observe(half, ones, mixed)
    assert calibration.discarded >= calibration.turns == 1
    # who takes its place knows of it
    later = Calibration(1, trusted=True)
    later.succeed(calibration)
    assert (later.discarded, later.turns) == (calibration.discarded, 1)


def test_the_state_says_what_was_expected_and_what_came():
    calibration = taught(2000)
    state = calibration.state()
    (raw, fitted), (_, auc) = state["nll"], state["auc"]
    assert fitted < raw and 0.5 < auc < 1.0
    assert sum(each["tokens"] for each in state["depths"]) == WINDOW * D_MAX
    for each in state["depths"]:
        assert abs(each["learnt"] - each["accepted"]) < 0.05
        assert abs(each["classifier"] - each["accepted"]) > abs(each["learnt"] - each["accepted"])
    json.dumps(state)
    untried = Calibration(2).state()
    assert (untried["nll"], untried["auc"]) == (None, None)
    assert untried["depths"] == [{"tokens": 0, "accepted": None, "classifier": None, "learnt": None}] * 2
    assert untried["joint"] == {"slope": 1.0, "offsets": [0.0, 0.0]}


def test_what_a_classifier_can_hold_of_it_predicts_better_than_the_classifier():
    calibration, stream = taught(2000), Stream.drawn(500, seed=2)
    found = joint(calibration)
    truth, confidence = (each.view(-1, D_MAX) for each in (stream.truth.cumprod(-1), stream.confidence))
    held = torch.sigmoid(found.slope * torch.logit(confidence) + found.offsets)
    before, after, best = judged(calibration)
    assert found.own == 0.0
    assert best < after < nll(held, truth) < before


def test_chances_are_compared_as_the_definition_says():
    score, hit = np.array([0.1, 0.4, 0.4, 0.8, 0.2]), np.array([False, True, False, True, False])
    pairs = [(float(a > b) + 0.5 * float(a == b)) for a in score[hit] for b in score[~hit]]
    assert auc(score, hit) == pytest.approx(sum(pairs) / len(pairs))


class Later(Executor):
    """A thread that works when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, partial(work, *given, **named)))
        return future

    def work(self) -> None:
        for future, done in self.waiting:
            future.set_result(done())
        self.waiting.clear()


def told(calibration: Calibration, steps: range) -> None:
    """By a stream; nothing is settled."""
    stream = Stream.drawn(steps.stop, seed=1)
    for step in steps:
        given = torch.full((REQUESTS,), D_MAX), stream.accepted(step)
        calibration.observe(stream.confidence[step], *given, log_prob=stream.log_prob[step])


def test_a_thread_fits_what_was_told_until_then():
    """To the bit, whatever comes meanwhile; and that is in force when it is settled, not before."""
    thread = Later()
    calibration, at_once = Calibration(D_MAX, thread=thread), Calibration(D_MAX)
    told(calibration, range(4))
    told(at_once, range(4))
    told(calibration, range(4, WINDOW // REQUESTS + 8))
    calibration.settle()
    # one at a time
    assert len(thread.waiting) == 1 and calibration.fits == 0 and calibration.in_force is None
    thread.work()
    assert calibration.fits == 0 and calibration.in_force is None
    calibration.settle()
    assert calibration.fits == at_once.fits == 1
    assert calibration.learnt.weights.tolist() == at_once.learnt.weights.tolist()
    told(calibration, range(WINDOW // REQUESTS + 8, WINDOW // REQUESTS + 8 + STEPS))
    assert len(thread.waiting) == 1


def test_a_fit_asks_torch_for_nothing():
    """Whose operations would have a team of OpenMP of the thread's own."""
    thread = Later()
    calibration = Calibration(D_MAX, thread=thread)
    owned = [f"{row}" for row in range(REQUESTS)]
    for known in (False, True):
        stream = Stream.drawn(WINDOW // REQUESTS, seed=1)
        for step in range(WINDOW // REQUESTS):
            given = torch.full((REQUESTS,), D_MAX), stream.accepted(step), owned if known else ()
            calibration.observe(stream.confidence[step], *given, log_prob=stream.log_prob[step])
            with Dispatched() as dispatched:
                thread.work()
            assert dispatched.computed == []
            calibration.settle()
    assert calibration.fits > 10


def test_a_real_thread_fits_and_what_it_learns_predicts_better():
    with ThreadPoolExecutor(1) as thread:
        calibration = Calibration(D_MAX, thread=thread)
        for step in range(400):
            told(calibration, range(step, step + 1))
            if calibration._fitting is not None:
                calibration._fitting.exception(timeout=60)
            calibration.settle()
    before, after, best = judged(calibration)
    assert calibration.fits > 10 and best < after < before


def test_a_fit_that_fails_ends_learning_and_nothing_else(caplog: pytest.LogCaptureFixture):
    thread = Later()
    calibration = Calibration(D_MAX, thread=thread)
    told(calibration, range(4))
    thread.waiting.pop()[0].set_exception(ArithmeticError("a singular matrix"))
    calibration.settle()
    told(calibration, range(4, 100))
    calibration.settle()
    assert calibration.failed and not thread.waiting
    assert [each.message for each in caplog.records] == [
        "C2T: learns no further, what is in force stays: a singular matrix"
    ]
    assert calibration.fits == 0 and calibration.seen == 100 * REQUESTS * D_MAX


def test_who_ends_is_told_what_was_learnt_until_then():
    """As an interpreter that ends has it: its threads take nothing more."""
    thread = ThreadPoolExecutor(1)
    calibration = Calibration(D_MAX, thread=thread)
    told(calibration, range(4))
    assert calibration._fitting is not None
    calibration._fitting.exception(timeout=60)
    calibration.settle()
    thread.shutdown()
    told(calibration, range(4, 100))
    assert calibration.fits == 1
    assert calibration.state()["seen"] == 100 * REQUESTS * D_MAX


def test_a_thread_that_cannot_begin_is_said_where_the_server_goes_on(caplog: pytest.LogCaptureFixture):
    thread = ThreadPoolExecutor(1)
    thread.shutdown()
    calibration = Calibration(D_MAX, thread=thread)
    told(calibration, range(4))
    assert not caplog.records
    calibration.settle()
    told(calibration, range(4, 100))
    calibration.settle()
    (line,) = [each.message for each in caplog.records]
    assert line.startswith("C2T: learns no further, what is in force stays: cannot schedule new futures")
    assert calibration.failed and calibration.fits == 0
