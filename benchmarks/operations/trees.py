"""One decoding step of trees, as chains.py has it of chains.

The draft's graph holds SGLang's own part of the loop too: positions, slots and hidden states of the branches.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from benchmarks.operations.chains import CURVE, TIERS, Target, batch_of, classifier, finish
from benchmarks.operations.counter import GPU, OperationCounter
from benchmarks.operations.steps import DEPTH, HIDDEN, IN_DRAFT_GRAPH, REQUEST_SLOTS, REQUESTS, VOCABULARY
from c2t_plugin.engines.sglang.drafters.tree import Grown, TreeDrafter
from c2t_plugin.engines.sglang.metrics import Counts
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.verify.lagged import PlannedRows
from c2t_plugin.engines.sglang.verify.packing import PackedVerify
from c2t_plugin.planner.tree_planner import TreePlanner
from c2t_plugin.trees.by_name import slot_policy
from c2t_plugin.trees.grower import TreeGrower

TOP_K, NODES, PREFIX, SLOTS = 3, 7, 20, 1000
# sync: cut by beta, and the host counts the rows; planned: it chooses them before the draft
SYNC, PLANNED = "trees", "trees, planned"
MODES = (SYNC, PLANNED)


def pool() -> MHATokenToKVPool:
    """The draft's keys and values: one layer."""
    made = object.__new__(MHATokenToKVPool)
    made.k_buffer, made.v_buffer = ([torch.zeros(SLOTS, 1, HIDDEN, device=GPU)] for _ in range(2))
    return made


class TreeSteps:
    """A server's steps of trees, one after the other."""

    def __init__(self, counter: OperationCounter, mode: str = SYNC) -> None:
        self._counter, self._target = counter, Target(counter)
        room = REQUESTS * NODES * (PREFIX + NODES)
        buffer = torch.zeros(room, dtype=torch.uint8, device=GPU)
        self._target.model_runner.attn_backend = SimpleNamespace(
            verify_mask=SimpleNamespace(buffer=buffer, mode=TreeMaskMode.FULL_MASK, fits=lambda _: True)
        )
        self._logits = torch.randn(REQUESTS, VOCABULARY, device=GPU)
        self._slots = torch.arange(1, REQUESTS + 1, device=GPU)
        self._scorer = TreeGrower(
            slot_policy("c2t", classifier(), TOP_K, GPU),
            top_m=1000,
            slots=REQUEST_SLOTS,
            max_depth=DEPTH,
            max_nodes=NODES - 1,
            beta=0.4 if mode == SYNC else 0.0,
            device=GPU,
        )
        self._packing = PackedVerify(self._target, masked=True, backend="triton")
        self._planner: TreePlanner | None = None
        lagged = None
        if mode == PLANNED:
            self._planner, lagged = self._plan()
        parts = Parts(self._scorer, Counts(DEPTH), None, self._planner, {"policy": "c2t"}, self._packing, lagged)
        self._drafter = TreeDrafter(self._worker(), parts)

    def _plan(self) -> tuple[TreePlanner, PlannedRows]:
        planner = TreePlanner(CURVE, None, topk=TOP_K, steps=DEPTH, most=NODES - 1, device=GPU)
        planner.packed, planner.sizes = True, self._packing.sizes
        planner.wait_for_nothing(REQUESTS, GPU)
        return planner, PlannedRows(planner)

    def _worker(self) -> SimpleNamespace:
        logits = torch.randn(REQUESTS * TOP_K, VOCABULARY, device=GPU)
        hidden = torch.randn(REQUESTS * TOP_K, HIDDEN, device=GPU)
        output = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=hidden))
        return SimpleNamespace(
            topk=TOP_K,
            speculative_num_steps=DEPTH,
            speculative_num_draft_tokens=NODES,
            tree_mask_mode=TreeMaskMode.FULL_MASK,
            target_worker=self._target,
            draft_attn_backend=SimpleNamespace(attn_backends=[None] * DEPTH),
            draft_runner=SimpleNamespace(
                token_to_kv_pool=pool(),
                model_config=SimpleNamespace(model_is_mrope=False),
                forward=lambda _: output,
            ),
        )

    def step(self) -> None:
        """See ChainSteps.step."""
        counter, branches = self._counter, REQUESTS * TOP_K
        batch = batch_of(self._slots)
        batch.seq_lens_sum = REQUESTS * PREFIX
        counter.next_step()
        with counter.part("plan"):
            if self._planner is not None:
                self._planner.begin(REQUESTS)
                self._planner.plan_rows(REQUESTS)
                # whatever that says, so that what counts does not hang on random numbers
                self._planner.rows = TIERS[-2]
        forward_batch = SimpleNamespace(
            out_cache_loc=torch.arange(branches * DEPTH, device=GPU),
            positions=torch.zeros(branches, dtype=torch.int64, device=GPU),
            req_pool_indices=self._slots,
            spec_info=SimpleNamespace(hidden_states=torch.zeros(REQUESTS, HIDDEN, device=GPU)),
            moe_num_token_non_padded=None,
        )
        with counter.part(IN_DRAFT_GRAPH):
            trees = self._drafter.loop(forward_batch, lambda _: None)
        draft_input = SimpleNamespace(bonus_tokens=torch.arange(REQUESTS, device=GPU))
        with counter.part("cut"):
            batch.spec_info = self._drafter.decide(batch, Grown(draft_input, trees))
        finish(counter, batch, batch.spec_info, self._packing)
        with counter.part("seeds"):
            self._scorer.write_seed(self._slots, self._logits)
