"""One decoding step of chains, as a GPU server takes it: what it dispatches beside its base algorithm.

SGLang's own parts are stubs, not counted: both models, `ForwardBatch.init_new` of the packed rows, the base class'
attention metadata and attention, and sampling. Counted as C2T's is what it calls of SGLang's besides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from benchmarks.operations import steps
from benchmarks.operations.counter import GPU, OperationCounter
from benchmarks.operations.steps import (
    DEPTH,
    HIDDEN,
    IN_DRAFT_GRAPH,
    IN_TARGET_GRAPH,
    REQUEST_SLOTS,
    REQUESTS,
    VOCABULARY,
)
from c2t_plugin.classifier import PAPER_FEATURES, ClassifierSpec, NodeClassifier
from c2t_plugin.engines.sglang import ranks
from c2t_plugin.engines.sglang.drafters.chain import ChainDrafter
from c2t_plugin.engines.sglang.metrics import Counts
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.step import step_of
from c2t_plugin.engines.sglang.verify.lagged import PlannedRows
from c2t_plugin.engines.sglang.verify.packing import PackedVerify
from c2t_plugin.engines.sglang.verify.predicted import LaggedRows
from c2t_plugin.engines.sglang.verify.triton import PackedTritonAttnBackend
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.network_learner import NetworkLearner
from c2t_plugin.planner.step_planner import StepPlanner
from c2t_plugin.scorer import ChainScorer

WIDTH = DEPTH + 1
TIERS = (8, 16, 24, 32, 40, 48, 56)
# planned: all that is drafted is verified; cut: less. network: planned, and the classifier itself is learnt too
CUT = "planned, cut"
MODES = ("sync", "lagged", "planned", CUT, "network")
PLANNED = ("planned", CUT, "network")
CURVE = CostCurve(verify=((8, 1.0), (56, 1.5)), draft=((1, 0.05), (8, 0.06)))


class Graphs:
    """What is asked of SGLang's runner of captured passes."""

    ragged_verify_mode = True
    capture_num_tokens = TIERS

    def _ragged_capture_slots(self, rows: int) -> int:
        return min(rows, REQUESTS)

    def can_run_graph(self, batch: Any) -> bool:
        return True


class Target:
    """SGLang's target worker around the packed attention backend."""

    def __init__(self, counter: OperationCounter) -> None:
        self._counter = counter
        self.model_runner = SimpleNamespace(decode_cuda_graph_runner=Graphs(), attn_backend=None)
        self.backend = backend = object.__new__(PackedTritonAttnBackend)
        backend.qo_indptr = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=GPU)
        backend.mask_indptr = torch.zeros(REQUESTS + 1, dtype=torch.int64, device=GPU)
        backend._row_numbers = torch.arange(max(TIERS), dtype=torch.int32, device=GPU)
        backend._captured_padding = torch.zeros(max(TIERS), dtype=torch.bool, device=GPU)

    def forward_batch_generation(self, batch: Any, forward_batch: Any, **_: Any) -> Any:
        rows = len(forward_batch.input_ids)
        with self._counter.uncounted():
            seen = [torch.zeros(rows, size, device=GPU) for size in (VOCABULARY, HIDDEN, HIDDEN)]
        with self._counter.part("attention metadata"):
            self.backend.init_forward_metadata_out_graph(forward_batch)
        with self._counter.part(IN_TARGET_GRAPH):
            self.backend.forward_extend(seen[2])
        output = SimpleNamespace(next_token_logits=seen[0], hidden_states=seen[1])
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=True)


def forward_batch_of(batch: Any, runner: Any = None, **_: Any) -> SimpleNamespace:
    """SGLang's ForwardBatch of a batch, as far as it is asked."""
    return SimpleNamespace(
        batch_size=REQUESTS,
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        input_ids=batch.input_ids,
        seq_lens=batch.seq_lens,
        spec_info=batch.spec_info,
    )


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (ForwardBatch, "init_new", forward_batch_of),
            (TritonAttnBackend, "init_forward_metadata_out_graph", lambda *_: None),
            (TritonAttnBackend, "forward_extend", lambda _, output: output),
            (ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def classifier() -> NodeClassifier:
    torch.manual_seed(0)
    size = len(PAPER_FEATURES)
    return NodeClassifier(ClassifierSpec(features=PAPER_FEATURES, shift=(0.0,) * size, scale=(1.0,) * size))


def batch_of(slots: Tensor) -> SimpleNamespace:
    """SGLang's batch, prepared for the uniform window."""
    rows = REQUESTS * WIDTH
    links = torch.arange(1, WIDTH + 1, device=GPU).repeat(REQUESTS, 1)
    links[:, -1] = -1
    window = SimpleNamespace(
        draft_token=torch.arange(rows, device=GPU),
        positions=torch.arange(rows, device=GPU),
        draft_token_num=WIDTH,
        retrieve_next_token=links,
        custom_mask=None,
    )
    return SimpleNamespace(
        reqs=[SimpleNamespace(rid=str(each)) for each in range(REQUESTS)],
        req_pool_indices=slots,
        out_cache_loc=torch.arange(rows, device=GPU),
        seq_lens=torch.full((REQUESTS,), 20, device=GPU),
        input_ids=window.draft_token,
        spec_info=window,
    )


class ChainSteps:
    """A server's steps of chains, one after the other."""

    def __init__(self, counter: OperationCounter, mode: str, drafter: type[ChainDrafter] = ChainDrafter) -> None:
        self._counter, self._mode, self._target = counter, mode, Target(counter)
        self._logits = torch.randn(REQUESTS, VOCABULARY, device=GPU)
        self._slots = torch.arange(1, REQUESTS + 1, device=GPU)
        self.scorer = ChainScorer(
            classifier(),
            slots=REQUEST_SLOTS,
            rows=REQUESTS,
            max_depth=DEPTH,
            # a planner decides alone
            beta=0.0 if mode in PLANNED else 0.4,
            device=GPU,
            keep_log_prob=mode in PLANNED,
            keep_stats=mode == "network",
        )
        self._packing = PackedVerify(self._target, backend="triton")
        self._planner, lagged = self._plan(mode)
        self._parts = Parts(self.scorer, Counts(DEPTH), None, self._planner, {}, packing=self._packing, lagged=lagged)
        self._drafter = drafter(SimpleNamespace(speculative_num_steps=DEPTH), self._parts)

    def _plan(self, mode: str) -> tuple[StepPlanner | None, LaggedRows | PlannedRows | None]:
        if mode not in PLANNED:
            return None, LaggedRows(self._packing.sizes, GPU, REQUESTS) if mode == "lagged" else None
        learner: Any = Calibration(DEPTH)
        if mode == "network":
            learner = NetworkLearner(classifier(), DEPTH, background=False)
        planner = StepPlanner(CURVE, None, steps=DEPTH, most=DEPTH, device=GPU, depths=(0, DEPTH), calibration=learner)
        planner.packed, planner.sizes = True, self._packing.sizes
        planner.wait_for_nothing(REQUESTS, GPU)
        return planner, PlannedRows(planner)

    def step(self) -> None:
        """Draft, cut, verify and report; then what the next draft needs."""
        counter = self._counter
        batch = batch_of(self._slots)
        counter.next_step()
        with counter.part("plan"):
            if self._planner is not None:
                self._planner.begin(REQUESTS)
                # as deep as ever, so that what counts does not hang on random numbers
                self._planner.depth = DEPTH
                self._planner.rows = TIERS[-2] if self._mode == CUT else self._planner.plan_rows(REQUESTS)
        with counter.part(IN_DRAFT_GRAPH):
            self.scorer.begin(self._slots)
            for _ in range(DEPTH - 1):
                self.scorer.step(self._logits)
        with counter.part("cut"):
            drafted = self._drafter.decide(batch, batch.spec_info)
        finish(counter, batch, drafted, self._packing)
        with counter.part("seeds"):
            self.scorer.write_seed(self._slots, self._logits)


def finish(counter: OperationCounter, batch: Any, drafted: Any, packing: PackedVerify) -> None:
    """Verify and report what was decided."""
    step = step_of(drafted)
    assert step is not None
    with packing.verifying(batch, step), counter.part("pack and scatter"):
        uniform = forward_batch_of(batch)
        uniform.capture_hidden_mode = uniform.mrope_positions = None
        packing.target_worker.forward_batch_generation(None, forward_batch=uniform)
    with counter.part("report"):
        # as the copy of a result to the host does
        step.to_host()


# see steps.counted
counted = partial(steps.counted, stand_ins=stand_ins)
