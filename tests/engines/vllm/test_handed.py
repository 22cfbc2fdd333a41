"""Drafts that travel with a step's sampled tokens, from the worker to the scheduler."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput  # noqa: E402

from c2t_plugin.engines.patching import ATTRIBUTE  # noqa: E402
from c2t_plugin.engines.vllm.handed import Handed, hand, posting  # noqa: E402


def output_of(*names: str) -> ModelRunnerOutput:
    return ModelRunnerOutput(list(names), {name: row for row, name in enumerate(names)}, [[1] for _ in names])


def test_drafts_reach_another_process_with_what_a_planner_goes_by():
    drafts = DraftTokenIds(["a"], [[3, 4]])
    setattr(drafts, ATTRIBUTE, "told")
    found = pickle.loads(pickle.dumps(hand(output_of("a"), lambda: drafts)))
    assert Handed.of(found).drafts == drafts and getattr(Handed.of(found).drafts, ATTRIBUTE) == "told"
    assert Handed.of(output_of("a")) == Handed()


def test_an_output_of_no_requests_is_left_alone():
    def never() -> Any:
        raise AssertionError("nobody asked")

    assert hand(None, never) is None and hand(EMPTY_MODEL_RUNNER_OUTPUT, never) is EMPTY_MODEL_RUNNER_OUTPUT
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, ATTRIBUTE)


class _Core:
    """An EngineCore; asked: how often it has asked its workers."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.asked = scheduler, 0

    def _stock(self, model_executed: bool) -> None:
        self.asked += 1

    post_step = posting(_stock)


def test_workers_are_asked_only_where_they_have_handed_nothing_over():
    taken: list[Any] = []
    core = _Core(SimpleNamespace(handed="drafts", update_draft_token_ids=taken.append))
    core.post_step(True)
    assert (taken, core.asked, core.scheduler.handed) == (["drafts"], 0, None)
    core.post_step(True)
    assert (taken, core.asked) == (["drafts"], 1)
    # a step that computed nothing has no drafts of its own
    core.scheduler.handed = "old"
    core.post_step(model_executed=False)
    assert (taken, core.asked) == (["drafts"], 2)
    # a scheduler that is none of ours
    other = _Core(SimpleNamespace())
    other.post_step(True)
    assert other.asked == 1
