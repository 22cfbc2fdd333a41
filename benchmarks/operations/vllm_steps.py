"""One decoding step of vLLM: what C2T's drafters dispatch beside the stock ones.

vLLM's own parts are stubs, not counted: both models, its draft loops, its sampling and copies. The drafters of both
model runners are C2T's own, over those stubs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.operations import steps
from benchmarks.operations.counter import GPU, OperationCounter
from benchmarks.operations.steps import DEPTH, HIDDEN, IN_DRAFT_GRAPH, REQUESTS, VOCABULARY
from c2t_plugin.classifier import FILE_NAME
from c2t_plugin.engines.checkpoints import CLASSIFIERS
from c2t_plugin.engines.vllm import verified
from c2t_plugin.engines.vllm.config import KEY, Settings
from c2t_plugin.engines.vllm.v1 import _ChainMixin
from c2t_plugin.engines.vllm.v2 import CuttingHandler, _ScoringMixin

CPU = torch.device("cpu")
V1_ON_CPU, V1, V2, V2_EAGER, V2_ADAPTIVE = "V1 on a CPU", "V1", "V2", "V2 without graphs", "V2 adaptive"
V2_PLANNED = "V2 planned"
DRAFT_STEPS, EARLY_END = "draft steps", "early end"


def configuration(requests: int, *, adaptive: bool = False, planned: bool = False) -> SimpleNamespace:
    """vLLM's, as far as drafters ask it. Nothing ends below a beta of 0, whatever random numbers say."""
    path = CLASSIFIERS / "eagle3" / FILE_NAME
    return SimpleNamespace(
        additional_config={KEY: asdict(Settings(str(path), "named", 0.0, "eagle3", planned=planned))},
        speculative_config=SimpleNamespace(num_speculative_tokens=DEPTH, enable_adaptive_verification=adaptive),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
    )


class StockProposer:
    """Model runner V1's: a loop of samples, each of which asks the draft model for logits."""

    method = "eagle3"

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.speculative_config = vllm_config.speculative_config
        self.num_speculative_tokens = DEPTH

    def load_model(self, model: Any) -> None:
        self.model = model

    def _greedy_sample(self, hidden: Tensor) -> Tensor:
        with self.model.counter.uncounted():
            chosen: Tensor = self.model.compute_logits(hidden).argmax(dim=-1)
            return chosen

    def _sample_draft_tokens(self, hidden: Tensor) -> tuple[Tensor, None]:
        return self._greedy_sample(hidden), None

    def propose(self, depth: int) -> Tensor:
        sampled = [self._sample_draft_tokens(self.model.hidden)[0] for _ in range(depth)]
        with self.model.counter.uncounted():
            return torch.stack(sampled, dim=1)


# ours over it
Proposer: Any = type("Proposer", (_ChainMixin, StockProposer), {})


class DraftModel:
    """Of one server; what it computes is not C2T's."""

    def __init__(self, counter: OperationCounter, requests: int, device: torch.device) -> None:
        self.counter = counter
        self.hidden = torch.zeros(requests, HIDDEN, device=device)
        self._logits = torch.randn(requests, VOCABULARY, device=device)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        with self.counter.uncounted():
            return self._logits.clone()


class StepsOfV1:
    """A server's steps on model runner V1."""

    def __init__(self, counter: OperationCounter, requests: int, device: torch.device) -> None:
        self._counter = counter
        batch = SimpleNamespace(req_ids=[str(row) for row in range(requests)])
        runner = SimpleNamespace(input_batch=batch, requests={})
        self.proposer: Any = Proposer(configuration(requests), device, runner)
        self.proposer._score = self._within(DRAFT_STEPS, self.proposer._score)
        self.proposer._ends = self._within(EARLY_END, self.proposer._ends)
        self.proposer.load_model(DraftModel(counter, requests, device))

    def _within(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*positional: Any, **keyword: Any) -> Any:
            with self._counter.part(part):
                return call(*positional, **keyword)

        return counted

    def step(self) -> None:
        """Draft and cut."""
        self._counter.next_step()
        with self._counter.part("cut"):
            assert all(len(row) == DEPTH for row in self.proposer.propose(DEPTH))


class StockSpeculator:
    """Model runner V2's: an estimator sees each step's logits. Where a graph is replayed no model is run."""

    method = "eagle3"

    def __init__(
        self, counter: OperationCounter, requests: int, *, graphs: bool, adaptive: bool, planned: bool
    ) -> None:
        self.counter, self._graphs, self.device = counter, graphs, GPU
        self.vllm_config = configuration(requests, adaptive=adaptive, planned=planned)
        self.max_num_reqs, self.num_speculative_steps = requests, DEPTH
        self.draft_tokens = torch.zeros((requests, DEPTH), dtype=torch.int64, device=GPU)
        self._logits = torch.randn(requests, VOCABULARY, device=GPU)
        self._slots, self._temperature = torch.arange(requests, device=GPU), torch.zeros(requests, device=GPU)
        self._confidences = torch.zeros((requests, DEPTH), device=GPU)
        self._number = torch.zeros((), dtype=torch.int64, device=GPU)
        self.acceptance_estimator: Any = None

    def load_model(self) -> None:
        pass

    def _run_model(self) -> None:
        pass

    def propose(self, batch: Any, **_: Any) -> Tensor:
        for number in range(DEPTH):
            if not self._graphs:
                with self.counter.part(EARLY_END):
                    self._run_model()
            with self.counter.uncounted():
                self._number.fill_(number)
            with self.counter.part(IN_DRAFT_GRAPH if self._graphs else DRAFT_STEPS):
                self.acceptance_estimator.predict(
                    self._logits, self._slots, self._number, self._confidences, self._temperature
                )
        return self.draft_tokens


# ours over it
Speculator: Any = type("Speculator", (_ScoringMixin, StockSpeculator), {})


class StepsOfV2:
    """A server's steps on model runner V2."""

    def __init__(
        self,
        counter: OperationCounter,
        requests: int,
        *,
        graphs: bool = True,
        adaptive: bool = False,
        planned: bool = False,
        handler: type[CuttingHandler] = CuttingHandler,
    ) -> None:
        self._counter, self._adaptive = counter, adaptive
        how = {"graphs": graphs, "adaptive": adaptive, "planned": planned}
        self._speculator: Any = Speculator(counter, requests, **how)
        self._speculator.load_model()
        self._handler = handler.__new__(handler)
        self._handler.draft_tokens_np = None
        self._handler.scorer = None if adaptive else self._speculator.scorer
        names = [str(row) for row in range(requests)]
        self._batch = SimpleNamespace(req_ids=names, num_reqs=requests, has_structured_output_reqs=False)
        self._slots = torch.arange(requests, device=GPU)
        self._sampled = torch.ones(requests, dtype=torch.int32, device=GPU)
        self._rejected = torch.full((requests,), DEPTH, dtype=torch.int32, device=GPU)
        stream: Any = None
        event = SimpleNamespace(record=lambda stream: None)
        sampled = SimpleNamespace(num_rejected=self._rejected)
        self._output: Any = SimpleNamespace(sampler_output=sampled, copy_event=event), stream, stream

    def step(self) -> None:
        """Count what was verified, draft, and cut."""
        counter = self._counter
        counter.next_step()
        with counter.part("report"):
            self._speculator.acceptance_estimator.step(self._slots, self._sampled, self._rejected)
            if self._adaptive:
                verified.VerifiedOutput(*self._output)
        with counter.part("draft"):
            drafted = self._speculator.propose(self._batch)
        with counter.part("cut"):
            self._handler.set_draft_tokens(self._batch, drafted)
            if not self._adaptive:
                # with asynchronous scheduling nobody asks
                self._handler.get_draft_tokens()
                self._speculator.tell()


MODES: dict[str, Callable[[OperationCounter, int], steps.Steps]] = {
    V1_ON_CPU: partial(StepsOfV1, device=CPU),
    V1: partial(StepsOfV1, device=GPU),
    V2: StepsOfV2,
    V2_EAGER: partial(StepsOfV2, graphs=False),
    V2_ADAPTIVE: partial(StepsOfV2, adaptive=True),
    V2_PLANNED: partial(StepsOfV2, planned=True),
}


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    # which would say that a stranger has bound the draft model's logits
    logger = logging.getLogger("vllm.c2t")
    with patch.object(verified, "stream", lambda *_: contextlib.nullcontext()), patch.object(logger, "disabled", True):
        yield


# see steps.counted
counted_of = partial(steps.counted, stand_ins=stand_ins, before=steps.BEFORE_ON_VLLM)


def counted(mode: str, requests: int = REQUESTS) -> OperationCounter:
    """What one step of this mode dispatches; on a CPU torch's own operations, without numpy's."""
    return counted_of(lambda counter: MODES[mode](counter, requests), on_host=mode == V1_ON_CPU)
