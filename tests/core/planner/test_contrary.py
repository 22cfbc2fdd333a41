"""Requests that say the contrary of all others: whom nothing is learnt from, and when they are believed."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import pytest
import torch

from c2t_plugin.planner import fitting
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.contrary import contrary
from tests.core.planner.test_calibration import D_MAX, REQUESTS, Stream, judged


def of_requests(requests: int, contrary: Callable[[int, int], bool]) -> tuple[Calibration, set[Hashable], int]:
    """Taught by requests of 24 drafts each, REQUESTS at a time. contrary: whether
    this request says the contrary in this step. Whom it ever disbelieved, and how many drafts it took."""
    calibration, stream = Calibration(D_MAX), Stream.drawn(requests // REQUESTS * 24, seed=1)
    disbelieved: set[Hashable] = set()
    for step, (confidence, log_prob) in enumerate(zip(stream.confidence, stream.log_prob, strict=True)):
        owners = [step // 24 * REQUESTS + row for row in range(REQUESTS)]
        accepted = stream.accepted(step)
        says = torch.tensor([contrary(owner, step) for owner in owners])
        whole = torch.full((REQUESTS,), D_MAX)
        calibration.observe(confidence, whole, torch.where(says, D_MAX - accepted, accepted), owners, log_prob)
        disbelieved |= calibration.contrary
    return calibration, disbelieved, calibration._count


def test_requests_that_say_the_contrary_are_not_believed(monkeypatch: pytest.MonkeyPatch):
    honest, none, drafts = of_requests(400, lambda owner, step: False)
    assert len(none) < 0.02 * 400
    poisoned, found, as_many = of_requests(400, lambda owner, step: owner % 10 == 3)
    assert as_many == drafts
    true = {owner for owner in found if owner % 10 == 3}
    assert len(true) > 0.5 * 40 and len(found - true) < 0.02 * 400
    monkeypatch.setattr(fitting, "contrary", lambda *_: set())
    believed, _, _ = of_requests(400, lambda owner, step: owner % 10 == 3)
    (_, clean, _), (_, mine, _), (_, bent, _) = (judged(each) for each in (honest, poisoned, believed))
    assert mine - clean < 0.5 * (bent - clean)


def test_where_many_say_the_contrary_it_is_what_the_traffic_says():
    """From the middle on all do."""
    turned, found, _ = of_requests(400, lambda owner, step: owner >= 200)
    assert len(found) < 0.05 * 400
    stream = Stream.drawn(500, seed=2)
    rows = stream.confidence.view(-1, D_MAX), stream.log_prob.view(-1, D_MAX)
    # few accepted where many were, and the other way round
    assert float(torch.corrcoef(torch.stack([turned(*rows)[:, 0], stream.truth.view(-1, D_MAX)[:, 0]]))[0, 1]) < 0


def test_a_request_is_judged_by_more_than_a_few_tokens():
    chance, reached = np.full((12, 2), 0.9), np.ones((12, 2), dtype=bool)
    hit = np.ones((12, 2), dtype=bool)
    hit[8:] = False
    owners = ["a", "a", "a", "a", "b", "b", "b", "b", *"dddd"]
    assert contrary(owners, chance, hit, reached) == {"d"}
    assert contrary(owners[:-1], chance[:-1], hit[:-1], reached[:-1]) == set()
    # nor by what is not known
    reached[8:, 1], chance[8:, 1] = False, np.nan
    assert contrary(owners, chance, hit, reached) == set()
    assert contrary(["d"] * 12, chance, hit, reached) == set()
    # three of four drafts are no exception
    assert contrary(["a"] * 4 + ["d"] * 8, np.full((12, 2), 0.9), np.arange(24).reshape(12, 2) < 8, hit | True) == set()
