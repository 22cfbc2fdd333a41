"""`--speculative-c2t-attention auto`: `tree_attention` verifies packed rows if it is right and faster on this GPU.

Held once at start, before the target's graphs are captured, with the target's heads and dtype: its error against the
float32 reference beside that of SGLang's kernel, then the times of both.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from c2t_kernels.attention.reference import tree_attention as reference

logger = logging.getLogger(__name__)

# Requests, and tokens before each one's rows: the first is judged, all are timed.
SHAPES = ((3, 40), (1, 512), (16, 1024))
# More than the error of SGLang's kernel by so much is wrong: sums of another order, rounded once more.
SLACK = 2.0
WARM_UP, REPEATS = 2, 7
# of one captured graph
LAUNCHES = 20

# With the arguments of SGLang's extend kernel, as `batch` has them.
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Heads:
    """Of the target on this rank."""

    queries: int
    keys: int
    dim: int


def batch(heads: Heads, shape: tuple[int, int], width: int, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """Arguments of SGLang's extend kernel: chains of `width` rows, of one less, ... and of 1 over a shuffled pool.

    As a graph launches it, whose batch has room for a request of each row: the others have neither rows nor a prefix.
    """
    requests, prefix = shape
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    lengths = width - torch.arange(requests, device=device) % width
    rows, slots = int(lengths.sum()), requests * prefix
    starts = torch.full((rows + 1,), rows, device=device)
    starts[0], starts[1 : requests + 1] = 0, lengths.cumsum(0)
    q = random(rows, heads.queries, heads.dim)
    new = [random(rows, heads.keys, heads.dim) for _ in range(2)]
    pools = [random(slots, heads.keys, heads.dim) for _ in range(2)]
    pages = torch.randperm(slots, generator=generator, device=device)
    indptr = torch.arange(rows + 1, device=device).clamp(max=requests) * prefix
    out = torch.full_like(q, torch.nan)
    cache = [*pools, starts.int(), indptr.int(), pages]
    return [q, *new, out, *cache, None, True, None, width, 1.0, 1.0, heads.dim**-0.5]


def error(kernel: Kernel, arguments: list[Any]) -> float:
    """Largest difference from the float32 reference; infinite where a row was not written."""
    q, k, v, out, k_pool, v_pool, *places = arguments[:9]
    out.fill_(torch.nan)
    kernel(*arguments)
    expected = reference(q.float(), k.float(), v.float(), k_pool.float(), v_pool.float(), *places, scale=arguments[-1])
    return float((out.float() - expected).abs().nan_to_num(nan=torch.inf).max())


def microseconds(call: Callable[[], Any]) -> float:
    """Of one launch on the GPU, the median of several. Out of a captured graph: from Python ours is slow to launch."""
    for _ in range(WARM_UP):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / LAUNCHES)
    return statistics.median(times)


def won(
    ours: Kernel,
    stock: Kernel,
    heads: Heads,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    timer: Callable[[Callable[[], Any]], float] = microseconds,
) -> bool:
    """Whether ours is to verify, said in the log with the figures. width: most rows of a request."""

    def contest(arguments: list[Any]) -> tuple[float, float]:
        return timer(lambda: ours(*arguments)), timer(lambda: stock(*arguments))

    try:
        judged = batch(heads, SHAPES[0], width, dtype, device)
        wrong, allowed = error(ours, judged), SLACK * error(stock, judged) + torch.finfo(dtype).eps
        if not wrong <= allowed:
            logger.warning(
                "C2T: tree_attention is off by %.3g here, allowed %.3g: SGLang's kernel verifies", wrong, allowed
            )
            return False
        times = [contest(batch(heads, shape, width, dtype, device)) for shape in SHAPES]
    except Exception as failure:  # whatever a compiler or a driver raises: the server can do without
        logger.warning(
            "C2T: tree_attention did not run here (%s: %s): SGLang's kernel verifies", type(failure).__name__, failure
        )
        return False
    faster = sum(mine for mine, _ in times) <= sum(theirs for _, theirs in times)
    told = ", ".join(
        f"{mine:.0f} and {theirs:.0f} us for {requests} x {prefix} tokens"
        for (requests, prefix), (mine, theirs) in zip(SHAPES[1:], times[1:], strict=True)
    )
    logger.info("C2T: attention %s verifies: tree_attention and SGLang's take %s", "tree" if faster else "stock", told)
    return faster
