"""How precise recorded statistics have to be for a fit: the script tells coarse from fine."""

from __future__ import annotations

import pytest
import torch

from benchmarks.report.tables import listing
from benchmarks.simulation import precision
from benchmarks.simulation.precision import OTHER_SEED, Plan, chains, differences, rows_of, stored
from c2t_plugin.provenance import RunRecord
from c2t_plugin.traces.file import Traces

pytestmark = pytest.mark.slow

PLAN = Plan(states=400, judged=200, seeds=2)


@pytest.fixture(scope="module")
def training() -> Traces:
    return chains(PLAN.states, "train")


def test_what_is_stored_keeps_labels_and_loses_what_is_between_two_levels(training: Traces):
    coarsely, finely = (stored(training, levels).chain for levels in (16, 256))
    assert all(torch.equal(each.accepted, training.chain.accepted) for each in (coarsely, finely))
    assert all(torch.equal(each.token_ids, training.chain.token_ids) for each in (coarsely, finely))
    errors = [(each.entropy - training.chain.entropy).abs().max() for each in (coarsely, finely)]
    # a level is 2 sqrt(value * top) / (levels - 1) wide
    assert 0 < errors[1] < errors[0] / 8 and errors[0] < 1


def test_levels_that_tell_nothing_apart_cost_most(training: Traces, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(precision, "LEVELS", {"64 levels": 64, "2 levels": 2})
    found = differences(PLAN, training, chains(PLAN.judged, "held-out"))
    assert list(found) == ["64 levels", "2 levels", OTHER_SEED]
    fine, none = found["64 levels"], found["2 levels"]
    assert (none["auc_difference"] or 0) > 3 * (fine["auc_difference"] or 0)
    assert (none["ratio"] or 0) > (fine["ratio"] or 0)
    assert all((each["ratio_low"] or 9) <= (each["ratio"] or 0) <= (each["ratio_high"] or 0) for each in found.values())
    rows = rows_of(PLAN, found, RunRecord.capture(seed=0).to_json())
    assert {row.kind for row in rows} == {"simulated"} and "verified tokens, ratio" in listing(rows)
