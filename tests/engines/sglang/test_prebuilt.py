"""Prefill-decode disaggregation, decode side: what the slots of requests that were prefilled elsewhere hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier  # noqa: E402
from c2t_plugin.engines.sglang import algo, requests  # noqa: E402
from c2t_plugin.engines.sglang.metrics import Counts  # noqa: E402
from c2t_plugin.engines.sglang.parts import Parts  # noqa: E402
from c2t_plugin.scorer import ChainScorer  # noqa: E402

FORMER, CUT_AT = 0.125, 1.0
SLOTS = torch.tensor([1, 3])


class Stock:
    """Of SGLang's worker what ours builds on, and a scorer."""

    device = "cpu"

    def __init__(self, algorithm: Any) -> None:
        self.speculative_algorithm = algorithm
        spec = ClassifierSpec(top_m=30)
        self.scorer = ChainScorer(NodeClassifier(spec), slots=4, rows=2, max_depth=3, beta=CUT_AT, device="cpu")
        found = {"request_settings": "all", "policy": "c2t"}
        self._draft_worker = SimpleNamespace(c2t=Parts(self.scorer, Counts(3), None, None, found))

    def forward_batch_generation(self, batch: Any, publish: Any = None) -> Any:
        return batch, publish


def request(**options: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params={"c2t": options} if options else None))


def logits(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 50, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def algorithm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """C2T_EAGLE3 as SGLang holds it, over a base that builds "draft" of what it gets."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    stock = SimpleNamespace(build_eagle_disagg_draft_input=lambda *got: ("draft", *got))
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.eagle_disaggregation", stock)
    algo.register()
    found = SpeculativeAlgorithm.from_string("C2T_EAGLE3")
    monkeypatch.setattr(type(found), "prebuilt", [])
    return found


@pytest.fixture
def worker(algorithm: Any, sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang.worker import StepMixin

    made = object.__new__(type("Worker", (StepMixin, Stock), {}))
    Stock.__init__(made, algorithm)
    return made


def check_first_draft(worker: Any) -> None:
    algorithm, scorer = worker.speculative_algorithm, worker.scorer
    requests.set_options(worker._draft_worker.c2t, SLOTS, [request(beta=FORMER, max_depth=1), request(beta=FORMER)])
    scorer.write_seed(SLOTS, logits(1, 2))

    batch = SimpleNamespace(req_pool_indices_cpu=SLOTS, reqs=[request(beta=0.5, max_depth=2), request()])
    last, futures, step = object(), object(), SimpleNamespace(reqs=[])
    assert algorithm.build_disagg_draft_input(batch, last, futures) == ("draft", batch, last, futures)
    batch.reqs.clear()
    # the step that was running meanwhile, with the former owner of slot 1
    scorer.write_seed(SLOTS[:1], logits(2, 1))

    assert worker.forward_batch_generation(step, publish="publish") == (step, "publish")
    assert algorithm.prebuilt == []
    beta, depth = scorer.limits_of(SLOTS)
    assert (beta.tolist(), depth.tolist()) == ([0.5, CUT_AT], [2, 3])
    scorer.begin(SLOTS)
    scorer.step(logits(3, 2))
    assert scorer.confidence(2).isnan().tolist() == [[True, False]] * 2
    # beta 1 cuts every token that has a confidence
    assert scorer.end(2)[1] == 1 and scorer.non_finite == 2

    scorer.write_seed(SLOTS, logits(4, 2))
    worker.forward_batch_generation(step)
    scorer.begin(SLOTS)
    assert not scorer.confidence(2).isnan().any(), "the next draft has its own statistics"


def test_the_first_drafts_first_token_is_kept_and_options_are_the_requests_own(worker: Any):
    check_first_draft(worker)


def forget_no_seed(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.scorer, "clear_seed", lambda _: None)


def leave_options(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.scorer, "set_requests", lambda *_: None)


def note_nothing(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = worker.speculative_algorithm
    monkeypatch.setattr(type(algorithm), "build_disagg_draft_input", lambda self, *got: ("draft", *got))


def take_over_too_early(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When SGLang builds the batch, while a step of the slots' former owners may still be running."""

    def build(algorithm: Any, *got: Any) -> Any:
        made = algo._build_disagg_draft_input(algorithm, *got)
        worker.forward_batch_generation(SimpleNamespace(reqs=[]))
        return made

    monkeypatch.setattr(type(worker.speculative_algorithm), "build_disagg_draft_input", build)


@pytest.mark.parametrize("fault", [forget_no_seed, leave_options, note_nothing, take_over_too_early])
def test_a_planted_fault_is_seen(fault: Callable[..., None], worker: Any, monkeypatch: pytest.MonkeyPatch):
    fault(worker, monkeypatch)
    with pytest.raises(AssertionError):
        check_first_draft(worker)


def test_0_5_17_passes_its_record_too(algorithm: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(algorithm), "base", SimpleNamespace(build_disagg_draft_input=lambda *got: got))
    batch = SimpleNamespace(req_pool_indices_cpu=SLOTS, reqs=[])
    assert algorithm.build_disagg_draft_input(batch, "record", "last", "map") == (batch, "record", "last", "map")
