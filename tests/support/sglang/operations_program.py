"""Counts what steps dispatch, and what steps with a fault do, for test_step_operations.py.

Usage: python operations_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input
from torch import Tensor

from benchmarks.operations import chains, table, trees
from benchmarks.operations.counter import GPU, OperationCounter
from benchmarks.operations.steps import DEPTH, REQUESTS
from c2t_kernels.stats.workspace import DraftStatsWorkspace
from c2t_plugin.engines.sglang.drafters.chain import ChainDrafter
from c2t_plugin.engines.sglang.step import step_of
from c2t_plugin.engines.sglang.verify.triton import PackedTritonAttnBackend


def event_of_this_step(kept: Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda kept: int(kept.sum()),
    "truth": lambda kept: bool(kept.any()),
    "mask": lambda kept: kept[kept > 0],
    "list index": lambda kept: kept[[0, 1]],
    "copy": lambda kept: kept.cpu(),
    "copy by to": lambda kept: kept.to("cpu"),
    "list": lambda kept: kept.tolist(),
    "tensor of a list": lambda kept: torch.tensor([1, 2], device=kept.device),
    "event of this step": event_of_this_step,
    "full": lambda kept: torch.full((1,), 3, device=kept.device),
    "cast": lambda kept: kept.long(),
    "copy without a wait": lambda kept: kept.to("cpu", non_blocking=True),
    "view": lambda kept: kept.view(-1, 1)[:3].T,
    "new memory": lambda kept: torch.empty_like(kept),
}


def with_faults() -> OperationCounter:
    """One step of mode lagged in which each fault is made once, in a part of its own, where the cut is known."""
    with OperationCounter() as counter, chains.stand_ins():

        class Faulty(ChainDrafter):
            def decide(self, batch: Any, drafted: Any) -> Any:
                made = super().decide(batch, drafted)
                step = step_of(made)
                assert step is not None
                for name, fault in FAULTS.items():
                    with counter.part(name):
                        fault(step.kept)
                return made

        chains.ChainSteps(counter, "lagged", Faulty).step()
    return counter


def of_links(context: int) -> dict[str, int]:
    """What SGLang dispatches to link a batch's chains where nobody reads their mask. context: of the longest request,
    which the buffer of that mask has no columns for."""
    width = DEPTH + 1
    with OperationCounter() as counter:
        backend = object.__new__(PackedTritonAttnBackend)
        backend.num_draft_tokens, backend.device, backend.max_context_len = width, GPU, context
        backend._verify_mask = backend._mask_buffer(REQUESTS, REQUESTS * width)
        table_of_slots = torch.zeros(REQUESTS, context, dtype=torch.int32, device=GPU)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            seq_lens=torch.full((REQUESTS,), 20, device=GPU),
            seq_lens_sum=None,
            req_pool_indices=torch.arange(REQUESTS, device=GPU),
            req_to_token_pool=SimpleNamespace(req_to_token=table_of_slots),
        )
        tokens = torch.arange(REQUESTS * width, device=GPU).view(REQUESTS, width)
        config = SimpleNamespace(model_is_mrope=False)
        with counter.part("links"):
            made = build_eagle_verify_input(
                *(batch, SimpleNamespace(bonus_tokens=tokens[:, 0]), tokens, tokens, tokens[:, 1:], None),
                target_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend, model_config=config)),
                topk=1,
                num_steps=DEPTH,
                num_draft_tokens=width,
                tree_mask_mode=TreeMaskMode.FULL_MASK,
                device="cuda",
            )
    assert made.retrieve_next_token[-1].tolist() == [*range(1, width), -1]
    return dict(counter.counts["links"])


def of_workspaces() -> int:
    """How many workspaces of draft_stats a step of trees makes."""
    with OperationCounter() as counter, chains.stand_ins():
        steps = trees.TreeSteps(counter)
        with patch.object(DraftStatsWorkspace, "create", Mock(wraps=DraftStatsWorkspace.create)) as create:
            steps.step()
    return create.call_count


def main(output: Path) -> None:
    faults = {name: of for name, of in table.as_json(with_faults()).items() if name in FAULTS}
    found = {"counts": table.counts(), "faults": faults, "links": of_links(1000), "workspaces": of_workspaces()}
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
