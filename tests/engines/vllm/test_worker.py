"""What our worker does around vLLM's own, as far as it takes no model: over a stub for that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier  # noqa: E402
from c2t_plugin.engines.patching import ATTRIBUTE  # noqa: E402
from c2t_plugin.engines.vllm.adaptive import StepScorer  # noqa: E402
from c2t_plugin.engines.vllm.ending import Sent  # noqa: E402
from c2t_plugin.engines.vllm.requests import OwnSettings  # noqa: E402
from c2t_plugin.engines.vllm.served import ServedTraces  # noqa: E402
from c2t_plugin.engines.vllm.worker import WorkerMixin  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from c2t_plugin.traces.file import load_traces  # noqa: E402
from c2t_plugin.traces.recorder import TraceRecorder  # noqa: E402


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

    def take_draft_token_ids(self) -> Any:
        return "drafts"

    def shutdown(self) -> None:
        self.shut_down = True


class Worker(WorkerMixin, Stock):
    """As C2TWorker is over vLLM's."""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    scorer = StepScorer(NodeClassifier(ClassifierSpec()), rows=2, max_depth=4, beta=0.0, device="cpu")
    traces = object.__new__(ServedTraces)
    traces._requests, traces._kept, traces._numbers = {}, None, {}
    traces._recorder = TraceRecorder(tmp_path, 1.0, 4, {"pair": {}, "top_m": 5}, 1000.0)
    recorder = traces._recorder
    known = {"scorer": scorer, "traces": traces, "own": OwnSettings("all", 2)}
    yield Worker(SimpleNamespace(**known, drafts=0, draft_steps=0, tell=lambda drafts: None))
    recorder.__class__.close(recorder)


def test_what_vllm_warmed_up_with_is_forgotten(worker: Worker):
    assert worker.compile_or_warm_up_model() == "times"
    state = worker.c2t_control()
    counted = ("drafts", "draft_steps", "non_finite", "accepted")
    assert [state[name] for name in counted] == [0, 0, 0, 0] and sum(state["verified"]) == 0
    # else it looks for a request that never was
    assert worker.take_draft_token_ids() == "drafts"


def test_what_a_drafter_tells_travels_on_its_drafts(worker: Worker, monkeypatch: pytest.MonkeyPatch):
    told = iter([7, None, 9])
    worker.model_runner.speculator.tell = lambda drafts: next(told)
    monkeypatch.setattr(Stock, "take_draft_token_ids", lambda self: SimpleNamespace())
    assert getattr(worker.take_draft_token_ids(), ATTRIBUTE) == 7
    assert not hasattr(worker.take_draft_token_ids(), ATTRIBUTE)
    # without a draft there is nothing to tell of
    monkeypatch.setattr(Stock, "take_draft_token_ids", lambda self: None)
    assert worker.take_draft_token_ids() is None and next(told) == 9


@pytest.mark.parametrize(
    "asked",
    [
        *({"beta": value} for value in (2, -0.5, math.nan, math.inf, "0.5", True, [], 10**400)),
        *({"max_depth": value} for value in (5, -1, 1.5, math.nan, math.inf, "1", True, [], 10**400)),
    ],
    ids=str,
)
def test_a_control_message_that_does_not_hold_changes_nothing(worker: Worker, asked: dict[str, Any]):
    before = worker.c2t_control()
    with pytest.raises(ConfigError, match=r"^(beta|max_depth) must be a (whole )?number"):
        worker.c2t_control(**{"beta": 0.5, "max_depth": 1, **asked})
    assert worker.c2t_control() == before
    assert worker.c2t_control(beta=0.5, max_depth=1)["max_depth"] == 1


def test_settings_that_did_not_hold_are_in_the_state(worker: Worker):
    worker.use_v2_model_runner, drafter = False, worker.model_runner.speculator
    worker.model_runner.drafter, drafter.own = drafter, OwnSettings("all", 2)
    drafter.draft_s, drafter.classifier_s = 0.5, None
    assert worker.c2t_control()["settings_ignored"] == 0
    bad = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"c2t_beta": 7}))
    drafter.own.of(["a", "b"], {"a": bad, "b": bad})
    assert worker.c2t_control()["settings_ignored"] == 2


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_drafts_are_scored_by_the_network_that_was_sent_with_a_step(
    worker: Worker, runner: str, monkeypatch: pytest.MonkeyPatch
):
    drafter = worker.model_runner.speculator
    worker.use_v2_model_runner, worker.model_runner.drafter = runner == "V2", drafter
    drafter.note, drafter.ending = lambda output: None, SimpleNamespace(sent=None)
    taken = []

    def ran(self: Any, output: Any) -> None:
        taken.append(drafter.scorer.network.out_bias.tolist())

    monkeypatch.setattr(Stock, "execute_model", ran, raising=False)
    before = [each.clone().numpy() for each in parameters(drafter.scorer.network)]
    for sent in (None, Sent(None), Sent(None, taken=tuple(each + 1.0 for each in before)), None):
        output = SimpleNamespace(finished_req_ids=())
        if sent is not None:
            setattr(output, ATTRIBUTE, sent)
        worker.execute_model(output)
    (bias,) = before[3].tolist()
    assert taken == [[pytest.approx(each)] for each in (bias, bias, bias + 1.0, bias + 1.0)]
    for found, mine in zip(parameters(drafter.scorer.network), before, strict=True):
        torch.testing.assert_close(found, torch.from_numpy(mine) + 1.0)


def parameters(network: Any) -> list[torch.Tensor]:
    return [network.hidden_weight, network.hidden_bias, network.out_weight, network.out_bias]


def test_a_recorder_that_cannot_close_does_not_keep_the_worker_up(worker: Worker):
    worker._traces()._recorder.close = lambda: 1 / 0  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError):
        worker.shutdown()
    assert worker.shut_down


class Texts:
    """vLLM's requests as a runner has them."""

    def __init__(self, output: list[int]) -> None:
        self.prompt_token_ids, self.output_token_ids = [1, 2], output


def draft_of(traces: ServedTraces, name: str, drafted: list[int]) -> None:
    assert traces.any_chosen([name])
    traces.keep(torch.zeros(1, 4, 4), [drafted], [name])
    traces.settle()


@pytest.mark.parametrize("gone", [True, False], ids=["forgotten by the runner", "still there"])
def test_an_aborted_request_leaves_nothing_to_another_under_its_id(worker: Worker, gone: bool):
    """Model runner V2 forgets a request that has to wait; it may be aborted then."""
    traces = worker._traces()
    recorder, requests = traces._recorder, traces._requests
    requests["same"] = Texts([5] * 40)
    draft_of(traces, "same", [6, 6, 6, 6])
    if gone:
        requests.clear()
    traces.finish(["same"])
    assert not recorder._open
    requests["same"] = Texts([5])
    draft_of(traces, "same", [6, 7, 8, 9])
    requests["same"].output_token_ids = [5, 6, 7, 8, 9]
    traces.finish(["same"])
    recorder.close()
    found = load_traces(recorder.directory)
    assert found.step.tolist() == [0] and found.chain.accepted.all()
    assert recorder.failed == 0


def test_recording_never_raises_into_serving(worker: Worker):
    traces = worker._traces()
    traces._recorder.admit = traces._recorder.finish = lambda *_: 1 / 0  # type: ignore[union-attr]
    assert not traces.any_chosen(["a"])
    traces._numbers, traces._requests["a"] = {"a": 1}, Texts([5])
    traces._kept = torch.zeros(1, 4, 4), [], ["a"]
    worker.take_draft_token_ids()
    traces.finish(["a"])
    assert traces._recorder.failed == 3
