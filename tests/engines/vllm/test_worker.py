"""What our worker does around vLLM's own, as far as it takes no model: over a stand-in for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier  # noqa: E402
from c2t_plugin.engines.vllm.adaptive import StepScorer  # noqa: E402
from c2t_plugin.engines.vllm.served import ServedTraces  # noqa: E402
from c2t_plugin.engines.vllm.worker import WorkerMixin  # noqa: E402


class Stock:
    """vLLM's worker on a GPU: it warms up with requests of its own, which it then forgets, and drafts for them."""

    use_v2_model_runner = True
    shut_down = False

    def __init__(self, speculator: Any) -> None:
        self.model_runner = SimpleNamespace(speculator=speculator)

    def compile_or_warm_up_model(self) -> str:
        drafter = self.model_runner.speculator
        drafter.drafts, drafter.draft_steps = 6, 20
        drafter.scorer.observe(torch.arange(2), torch.tensor([3, 1]), torch.tensor([0, 4]))
        drafter.scorer.non_finite += 3
        drafter.traces.keep(torch.zeros(1, 4, 4), [[1, 2, 3, 4]], ["_warmup_9_"])
        return "times"

    def take_draft_token_ids(self) -> str:
        return "drafts"

    def shutdown(self) -> None:
        self.shut_down = True


class Worker(WorkerMixin, Stock):
    """As C2TWorker is over vLLM's."""


@pytest.fixture
def worker() -> Worker:
    scorer = StepScorer(NodeClassifier(ClassifierSpec()), rows=2, max_depth=4, beta=0.0, device="cpu")
    traces = object.__new__(ServedTraces)
    traces._requests, traces._recorder, traces._kept = {}, SimpleNamespace(share=1.0), None
    return Worker(SimpleNamespace(scorer=scorer, traces=traces, drafts=0, draft_steps=0))


def test_what_vllm_warmed_up_with_is_forgotten(worker: Worker):
    assert worker.compile_or_warm_up_model() == "times"
    state = worker.c2t_control()
    counted = ("drafts", "draft_steps", "non_finite", "accepted")
    assert [state[name] for name in counted] == [0, 0, 0, 0] and sum(state["verified"]) == 0
    # else it looks for a request that never was
    assert worker.take_draft_token_ids() == "drafts"


def test_a_recorder_that_cannot_close_does_not_keep_the_worker_up(worker: Worker):
    worker._traces()._recorder.close = lambda: 1 / 0  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError):
        worker.shutdown()
    assert worker.shut_down
