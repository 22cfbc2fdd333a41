"""Counts what steps dispatch, and what a step with a fault does, for tests/engines/vllm/test_step_operations.py.

Usage: python -m tests.support.vllm.operations_program OUTPUT.json REQUESTS..., with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.operations import table, vllm_steps
from c2t_plugin.engines.vllm.v2 import CuttingHandler


class Faulty(CuttingHandler):
    """Asks the device once more, and has an operation of its own for each request."""

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        super().set_draft_tokens(input_batch, draft_tokens)
        assert self._kept is not None
        for row in range(len(self._kept)):
            self._kept[row] + 1
        int(self._kept[0])


def with_fault(requests: int) -> Any:
    return table.as_json(vllm_steps.counted_of(lambda counter: vllm_steps.StepsOfV2(counter, requests, handler=Faulty)))


def main(output: Path, sizes: Sequence[int]) -> None:
    found = {requests: table.counts(requests) for requests in sizes}
    faulty = {requests: with_fault(requests) for requests in sizes}
    output.write_text(json.dumps({"counts": found, "faulty": faulty}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
