"""Device times of GPU work: graph replays over rotating inputs, so that neither launches nor the cache are measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

WARM_UP = 3
REPLAYS = 25
# Calls of one graph: enough that its own launch, some microseconds, is spread over many.
CALLS_PER_GRAPH = 20


def copies_to_outgrow_cache(input_bytes: int, cache_bytes: int) -> int:
    """How many sets of inputs to rotate over, so that twice the cache lies between two uses of one set."""
    return max(1, min(CALLS_PER_GRAPH, -(-2 * cache_bytes // max(1, input_bytes))))


def cache_bytes() -> int:
    """Size of the current GPU's L2 cache."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def graph_us(calls: Sequence[Call]) -> float:
    """Median microseconds of one call, the calls taken in turn inside a captured graph.

    calls: the same operation on different inputs, already warmed up and safe to capture.
    """
    rounds = -(-CALLS_PER_GRAPH // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return _median_us(graph.replay) / (rounds * len(calls))


def eager_us(calls: Sequence[Call]) -> float:
    """Median microseconds of one call launched from Python, for what cannot be captured."""

    def all_calls() -> None:
        for call in calls:
            call()

    return _median_us(all_calls) / len(calls)


def _median_us(work: Callable[[], object]) -> float:
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    found = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)
