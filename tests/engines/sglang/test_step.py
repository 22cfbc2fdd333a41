"""The records that ride on SGLang's objects: one of a step, one of a request, each under one name."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from c2t_plugin.engines.patching import ATTRIBUTE
from c2t_plugin.engines.sglang.metrics import RequestCounts
from c2t_plugin.engines.sglang.step import Drafted, Step, attach, record_of, step_of
from c2t_plugin.request_options import RequestOptions

KEPT = torch.tensor([2, 0], dtype=torch.int32)


def test_a_step_is_carried_under_one_name_and_no_other_is_set():
    holder = SimpleNamespace()
    assert step_of(holder) is None
    step = Step(KEPT, rows=4)
    attach(holder, step)
    assert vars(holder) == {ATTRIBUTE: step}
    # a shallow copy, as packing makes of a verify input, carries it too
    assert step_of(copy.copy(holder)) is step


def test_a_step_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Step(KEPT).rows = 3  # type: ignore[misc]


def test_only_what_is_read_on_the_host_is_copied_there():
    drafted = Drafted(torch.arange(6).view(2, 3), torch.zeros(2, 3, 4))
    step = Step(KEPT, KEPT + 1, drafted, rows=5, depth=3, seconds=0.1).to_host()
    assert step.kept is KEPT
    assert step.wanted is not None and step.wanted.tolist() == [3, 1]
    assert step.drafted is not None and torch.equal(step.drafted.tokens, drafted.tokens)
    assert (step.rows, step.depth, step.seconds) == (5, 3, 0.1)
    assert Step(KEPT, drafted=Drafted(drafted.tokens)).to_host().drafted == Drafted(drafted.tokens)
    assert Step(KEPT).to_host() == Step(KEPT)


def test_a_request_has_one_record_for_its_life():
    req = SimpleNamespace(rid="a")
    record = record_of(req)
    assert (record.own_beta, record.options, record.counts, record.trace) == (False, None, None, None)
    record.options, record.counts = RequestOptions(enabled=False), RequestCounts()
    assert record.own_beta
    assert record_of(req) is record
    assert vars(req) == {"rid": "a", ATTRIBUTE: record}
