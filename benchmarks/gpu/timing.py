"""Device times of GPU work: graph replays over rotating inputs, so that neither launches nor the cache are measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Call = Callable[[], object]

WARM_UP = 3
REPLAYS = 25
FEWEST_REPLAYS = 5
# Most of one measurement's time: slow work needs no 25 repetitions.
MEASUREMENT_S = 0.25
# Calls of one graph: enough that its own launch, some microseconds, is spread over many, or so much work.
CALLS_PER_GRAPH = 20
GRAPH_US = 20_000.0
# Most sets of inputs to rotate over: each is a call of the graph, and tensors to make. 50 MB of cache are outgrown by
# sets from 25 KB on.
MOST_COPIES = 2048


class Times(NamedTuple):
    """Microseconds of one call: median, 20th and 80th percentile over `replays` timed repetitions, which follow WARM_UP
    untimed ones."""

    us: float
    us_p20: float
    us_p80: float
    replays: int


def copies_to_outgrow_cache(input_bytes: int, cache_bytes: int) -> int:
    """How many sets of inputs to rotate over: twice the cache together, or as much of it as MOST_COPIES sets are."""
    return max(1, min(MOST_COPIES, -(-2 * cache_bytes // max(1, input_bytes))))


def cache_bytes() -> int:
    """Size of the current GPU's L2 cache."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def first_call_s(call: Call) -> tuple[object, float]:
    """What a call returns, and its wall-clock seconds, compilations included, until the GPU is done."""
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, time.perf_counter() - start


def graph_times(calls: Sequence[Call]) -> Times:
    """Of one call, the calls taken in turn inside a captured graph.

    calls: the same operation on different inputs, already warmed up and safe to capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        rounds = rounds_of_graph(len(calls), _event_us(calls[0]))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return _times(graph.replay, rounds * len(calls))


def eager_times(calls: Sequence[Call]) -> Times:
    """Of one call launched from Python, for what cannot be captured."""

    def all_calls() -> None:
        for call in calls:
            call()

    return _times(all_calls, len(calls))


def rounds_of_graph(calls: int, us: float) -> int:
    """How often a graph holds its `calls` calls of about `us` microseconds each: more than once if they are short."""
    return max(1, min(-(-CALLS_PER_GRAPH // calls), int(GRAPH_US / (max(us, 1.0) * calls))))


def replays_within(us: float, seconds: float = MEASUREMENT_S) -> int:
    """How often to repeat work of `us` microseconds: REPLAYS times if that fits, never fewer than FEWEST_REPLAYS."""
    return min(REPLAYS, max(FEWEST_REPLAYS, int(seconds * 1e6 / max(us, 1.0))))


def _times(work: Callable[[], object], calls: int) -> Times:
    for _ in range(WARM_UP):
        last = _event_us(work)
    return times_of([_event_us(work) / calls for _ in range(replays_within(last))])


def times_of(samples: Sequence[float]) -> Times:
    """samples: microseconds, two at least."""
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return Times(us=tenths[4], us_p20=tenths[1], us_p80=tenths[7], replays=len(samples))


def _event_us(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
