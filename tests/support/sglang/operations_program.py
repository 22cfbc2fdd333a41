"""Counts what steps dispatch, and what steps with a fault do, for test_step_operations.py.

Usage: python operations_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.operations import chains, table
from benchmarks.operations.counter import OperationCounter
from c2t_plugin.engines.sglang.drafters.chain import ChainDrafter
from c2t_plugin.engines.sglang.step import step_of


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


def main(output: Path) -> None:
    faults = {name: of for name, of in table.as_json(with_faults()).items() if name in FAULTS}
    output.write_text(json.dumps({"counts": table.counts(), "faults": faults}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
