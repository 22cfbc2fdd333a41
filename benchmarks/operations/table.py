"""The table of what each mode's step dispatches, part by part. In a process with Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial

from benchmarks.operations.counter import OperationCounter
from benchmarks.operations.steps import IN_GRAPHS, REQUESTS

# How often each operation is dispatched, by mode and part; the same of waits.
Counted = dict[str, dict[str, dict[str, dict[str, int]]]]


def counts(requests: int = REQUESTS) -> Counted:
    """{mode: {part: {"operations": {name: times}, "waits": {name: times}}}}, of the engine that is installed.

    requests: of vLLM's steps.
    """
    found = _of_sglang() if importlib.util.find_spec("sglang") is not None else _of_vllm(requests)
    return {mode: as_json(counter) for mode, counter in found.items()}


def _of_sglang() -> dict[str, OperationCounter]:
    from benchmarks.operations import chains, trees

    found = {mode: chains.counted(partial(chains.ChainSteps, mode=mode)) for mode in chains.MODES}
    return found | {mode: chains.counted(partial(trees.TreeSteps, mode=mode)) for mode in trees.MODES}


def _of_vllm(requests: int) -> dict[str, OperationCounter]:
    from benchmarks.operations import vllm_steps

    return {mode: vllm_steps.counted(mode, requests) for mode in vllm_steps.MODES}


def as_json(counter: OperationCounter) -> dict[str, dict[str, dict[str, int]]]:
    return {
        part: {"operations": dict(counter.counts[part]), "waits": dict(counter.waits[part])} for part in counter.counts
    }


def outside_of_graphs(parts: Mapping[str, Mapping[str, Mapping[str, int]]]) -> int:
    """Operations of a step that the host dispatches itself."""
    return sum(sum(of["operations"].values()) for part, of in parts.items() if part not in IN_GRAPHS)


def printed(found: Counted) -> str:
    """As a table of Markdown."""
    lines = ["| mode | part | operations | waits | which |", "| --- | --- | --- | --- | --- |"]
    for mode, parts in found.items():
        for part, of in parts.items():
            operations, waits = (sum(of[kind].values()) for kind in ("operations", "waits"))
            which = ", ".join(f"{name} {times}" for name, times in {**of["operations"], **of["waits"]}.items())
            lines.append(f"| {mode} | {part} | {operations} | {waits} | {which} |")
        waits = sum(sum(of["waits"].values()) for of in parts.values())
        lines.append(f"| {mode} | **outside of graphs** | {outside_of_graphs(parts)} | {waits} | |")
    return "\n".join(lines)
