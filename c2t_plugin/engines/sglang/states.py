"""Building and applying SGLang's adaptive runtime states, one for each depth (drafters/depths.py) or width
(verify/windows.py)."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from sglang.srt.runtime_context import get_context, get_spec
from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as extend_graphs

from c2t_plugin.engines.sglang.patches import EXTEND_WIDTH, PATCHES


def build(worker: Any, depth: int, width: int) -> Any:
    """A state of this depth and width, with attention backends and CUDA graphs of its own."""
    with _extend_graphs_of_the_state():
        return worker.build_adaptive_runtime_state(depth, width)


def _extend_graphs_of_the_state() -> contextlib.AbstractContextManager[None]:
    if "server_args" not in inspect.signature(extend_graphs.resolve_num_tokens_per_req).parameters:
        return contextlib.nullcontext()
    return PATCHES.during(EXTEND_WIDTH, lambda *, phase, server_args: get_spec().speculative_num_draft_tokens)


def apply(worker: Any, state: Any) -> None:
    """Run in this state from now on."""
    worker.apply_runtime_state(state)
    changes = get_context()._overrides_log
    # SGLang keeps every change for ever, of which there may be one a step; it reads the newest of a kind alone.
    if len(changes) > 1 and changes[-2][0] == changes[-1][0] and changes[-2][1].keys() == changes[-1][1].keys():
        del changes[-2]
