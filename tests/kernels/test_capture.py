"""What a captured CUDA graph asks of every launcher: nothing read on the host, no memory but for results, inputs read
anew.

On a GPU the launches are captured and replayed. Without one the launchers run under a watch on torch's operations, the
kernels left out, and a second launch takes the place of the replay. One file, because all
operations go through the same watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from c2t_kernels import ChainState, DraftStats
from c2t_kernels.stats.workspace import DraftStatsWorkspace
from c2t_kernels.step import StepState
from tests.support.kernels.networks import PAPER, random_network
from tests.support.kernels.sides import OPERATIONS, fused, reference

# the interpreter computes with numpy, which warns of infinities
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

# Their result, or its shape, is known only when the device is done.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "is_nonzero", "_to_copy", "item")
NEW_MEMORY = ("empty", "zeros", "ones", "full", "new_", "clone", "arange", "scalar_tensor", "lift_fresh")


@dataclass
class Launch:
    """inputs: tensors of the device that a replay may find changed, and what they are changed to.

    call: the launcher on these inputs. judge: the reference on the same inputs. Both
    return tensors to compare.
    """

    inputs: list[tuple[Tensor, Tensor]]
    call: Callable[[], Any]
    judge: Callable[[], Any]
    tolerance: float = 0.0


def changing(device: str, *pairs: tuple[Any, Any]) -> list[tuple[Tensor, Tensor]]:
    return [tuple(torch.as_tensor(value).to(device) for value in pair) for pair in pairs]  # type: ignore[misc]


def empty_like(result: Any) -> Any:
    return torch.empty_like(result) if isinstance(result, Tensor) else type(result)(*map(empty_like, result))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def draft_stats(device: str) -> Launch:
    inputs = changing(
        device, (draw(3, 300, seed=0), draw(3, 300, seed=1) * 9), (torch.tensor([7], dtype=torch.int32), [200])
    )
    (logits, _), (top_m, _) = inputs
    out, workspace = empty_like(reference.draft_stats(logits, 7, 2)), DraftStatsWorkspace.create(3, device)
    return Launch(
        inputs,
        lambda: fused.draft_stats(logits, top_m, 2, out=out, workspace=workspace),
        lambda: reference.draft_stats(logits, int(top_m), 2),
        # sums of 300 terms in another order
        1e-5,
    )


def statistics_of_a_draft(device: str) -> Launch:
    """As a server asks for them: its top-M is a number, and what is written is there."""
    logits = draw(3, 300, seed=0).to(device)
    out = empty_like(reference.draft_stats(logits, 7, 1))
    asked: dict[str, Any] = {"out": out}
    return Launch([], lambda: fused.draft_stats(logits, 7, **asked), lambda: reference.draft_stats(logits, 7, **asked))


def score_chain(device: str) -> Launch:
    inputs = changing(
        device,
        *((-draw(5, seed=seed), -3 * draw(5, seed=seed + 9)) for seed in range(3)),
    )
    log_prob, entropy, margin = (tensor for tensor, _ in inputs)
    network, states = random_network(PAPER, 8, device), [ChainState.create(5, 2, device) for _ in range(2)]

    def scored(op: Any, state: ChainState) -> list[Tensor]:
        for depth in (1, 2):
            op(state, network, log_prob, entropy, margin, depth)
        return [state.joint_log_prob, state.path_entropy, state.confidence]

    # sums of 8 products in another order
    return Launch(
        inputs, lambda: scored(fused.score_chain, states[0]), lambda: scored(reference.score_chain, states[1]), 1e-5
    )


def score_step(device: str) -> Launch:
    """A draft's first step, then its second."""
    inputs = changing(
        device,
        *((-draw(5, seed=seed), -3 * draw(5, seed=seed + 9)) for seed in range(3)),
        (torch.tensor(0), 1),
        (torch.tensor([3, 0, -1, 2, 1]), [0, 1, 2, 3, -1]),
        (torch.tensor([0.2]), [0.5]),
        (torch.tensor([2], dtype=torch.int32), [1]),
    )
    arguments = [tensor for tensor, _ in inputs]
    network, states = random_network(PAPER, 8, device), [StepState.create(5, 2, device) for _ in range(2)]
    chances = torch.zeros(2, 5, 2, device=device)

    def scored(op: Any, own: int) -> list[Tensor]:
        op(states[own], network, *arguments, chances[own])
        return [*states[own], chances[own]]

    # sums of 8 products in another order
    return Launch(inputs, lambda: scored(fused.score_step, 0), lambda: scored(reference.score_step, 1), 1e-5)


def fill_spare_rows(device: str) -> Launch:
    inputs = changing(
        device,
        (draw(3, 6, seed=0) > 0.7, draw(3, 6, seed=1) > 0.7),
        (draw(3, 6, seed=2), draw(3, 6, seed=3)),
        (torch.tensor([8, 12]), [11, 16]),
        (torch.tensor([False, True, False]), [True, False, False]),
    )
    keep, key, sizes, own = (tensor for tensor, _ in inputs)
    arguments = keep, key, 5, sizes, own
    return Launch(inputs, lambda: fused.fill_spare_rows(*arguments), lambda: reference.fill_spare_rows(*arguments))


def clip_trees(device: str) -> Launch:
    inputs = changing(
        device,
        (draw(3, 6, seed=0) > 0.3, draw(3, 6, seed=1) > 0.3),
        (draw(3, 6, seed=2), draw(3, 6, seed=3)),
    )
    keep, key = (tensor for tensor, _ in inputs)
    return Launch(inputs, lambda: fused.clip_trees(keep, key, 5, 7), lambda: reference.clip_trees(keep, key, 5, 7))


def early_stop(device: str) -> Launch:
    int32 = torch.int32
    inputs = changing(
        device,
        (draw(6, 4, seed=0), draw(6, 4, seed=1)),
        (torch.tensor([0.2]), [0.5]),
        (torch.full((6,), 4, dtype=int32), [3, 2, 4, 0, 1, 4]),
        (torch.tensor([9], dtype=int32), [5]),
    )
    confidence, beta, longest, budget = (tensor for tensor, _ in inputs)
    return Launch(
        inputs,
        lambda: fused.early_stop(confidence, beta, longest, budget=budget),
        lambda: reference.early_stop(confidence, beta, longest, budget=budget),
    )


def pack_ragged(device: str) -> Launch:
    inputs = changing(
        device,
        (torch.tensor([1, -1, 2], dtype=torch.int32), [0, 2, 1]),
        (torch.arange(9).view(3, 3), torch.arange(9).view(3, 3) + 50),
        (draw(3, 3, 5, seed=0), draw(3, 3, 5, seed=1)),
    )
    kept, words, rows = (tensor for tensor, _ in inputs)

    def tensors(packed: Any) -> list[Tensor]:
        return [*packed.values, packed.cu_seqlens, packed.lengths]

    sizes: dict[str, Any] = {"capacity": 8, "pads": [9, -1.0]}
    return Launch(
        inputs,
        lambda: tensors(fused.pack_ragged(kept, [words, rows], **sizes)),
        lambda: tensors(reference.pack_ragged(kept, [words, rows], **sizes)),
    )


def scatter_ragged(device: str) -> Launch:
    inputs = changing(
        device, (draw(6, 5, seed=0), draw(6, 5, seed=1)), (torch.tensor([0, 2, 2, 5], dtype=torch.int32), [0, 1, 4, 6])
    )
    (packed, _), (at, _) = inputs
    return Launch(
        inputs,
        lambda: fused.scatter_ragged(packed, at, 3, fill=-2.0),
        lambda: reference.scatter_ragged(packed, at, 3, fill=-2.0),
    )


def grow_layer(device: str) -> Launch:
    alive = torch.tensor([[True, False], [True, True]])
    inputs = changing(
        device,
        (-draw(2, 2, seed=0), -draw(2, 2, seed=1)),
        (draw(2, 2, seed=6), draw(2, 2, seed=7)),
        (alive, ~alive),
        *((-draw(4, 3, seed=2), -draw(4, 3, seed=3)), (draw(4, seed=4), draw(4, seed=5))),
        (torch.tensor([0.5]), [0.45]),
    )
    joint, path, live, log_probs, entropy, beta = (tensor for tensor, _ in inputs)
    stats = DraftStats(torch.arange(12, device=device).view(4, 3), log_probs, entropy, entropy)
    arguments = (random_network((*PAPER, "path_entropy"), 8, device), joint, path, live, stats, beta, 2)
    return Launch(
        inputs,
        lambda: fused.grow_layer(*arguments, width=3),
        lambda: reference.grow_layer(*arguments, width=3),
        # sums of 8 products in another order
        1e-5,
    )


def build_tree(device: str) -> Launch:
    inputs = changing(
        device,
        (torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, 2]]), [[-1, -1, 1, 1], [-1, 0, 1, 2]]),
        (torch.ones(2, 4, dtype=torch.bool), [[True, True, False, False], [True, True, True, True]]),
        (torch.tensor([7, 9]), [11, 0]),
    )
    parents, keep, prefix = (tensor for tensor, _ in inputs)
    tokens, roots = torch.arange(8, device=device).view(2, 4), torch.arange(2, device=device)
    arguments = (parents, keep, tokens, roots, prefix)
    return Launch(
        inputs,
        lambda: fused.build_tree(*arguments, bucket=6),
        lambda: reference.build_tree(*arguments, bucket=6),
    )


def full_mask(device: str) -> Launch:
    inputs = changing(
        device,
        (torch.ones(2, 3, 3).tril().bool(), torch.eye(3).bool().expand(2, 3, 3)),
        (torch.tensor([4, 1]), [0, 3]),
        (torch.tensor([3, 2], dtype=torch.int32), [1, 3]),
    )
    trees, prefix, counts = (tensor.contiguous() for tensor, _ in inputs)
    inputs = [(mine, theirs) for mine, (_, theirs) in zip((trees, prefix, counts), inputs, strict=True)]
    out = torch.empty(60, dtype=torch.bool, device=device)

    def known(op: Any, **buffers: Any) -> list[Tensor]:
        mask, ends = op(trees, prefix, capacity=60, counts=counts, **buffers)
        # what lies behind the last request has no meaning
        return [mask & (torch.arange(60, device=device) < ends[-1]), ends]

    return Launch(inputs, lambda: known(fused.full_mask, out=out), lambda: known(reference.full_mask))


def tree_attention(device: str) -> Launch:
    """Two requests of 2 and 3 nodes, then of 4 and 1, within the same rows."""
    inputs = changing(
        device,
        *((draw(5, 2, 64, seed=seed), draw(5, 2, 64, seed=seed + 9)) for seed in range(3)),
        (torch.tensor([0, 2, 5], dtype=torch.int32), [0, 4, 5]),
        (torch.tensor([0, 30, 37], dtype=torch.int32), [0, 1, 40]),
        (torch.randperm(40, generator=torch.Generator().manual_seed(0)).int(), torch.arange(40)),
    )
    q, k, v, nodes_at, pages_at, pages = (tensor for tensor, _ in inputs)
    pools = draw(2, 40, 2, 64, seed=20).to(device)
    arguments = (q, k, v, *pools, nodes_at, pages_at, pages)
    out = torch.empty(5, 2, 64, device=device)
    return Launch(
        inputs,
        lambda: fused.tree_attention(*arguments, max_nodes=5, out=out),
        lambda: reference.tree_attention(*arguments),
        # float32 sums of at most 44 terms in another order
        5e-6,
    )


LAUNCHES = (
    *(draft_stats, score_chain, score_step, early_stop, pack_ragged, scatter_ragged),
    *(grow_layer, fill_spare_rows, clip_trees, build_tree, full_mask, tree_attention),
)
# What captured draft loops of chains call. The others take memory for results, whose size depends on shapes alone, and
# a graph keeps its own.
TAKES_NO_MEMORY = {"draft_stats", "score_chain", "score_step"}


class Watch(TorchDispatchMode):
    """Notes the operations of torch that wait for the device or take memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in WAITING or name.startswith(NEW_MEMORY):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter copies arguments to and fro; what is watched is the launcher."""
    from triton.runtime.interpreter import GridExecutor

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: None)
        yield


def test_there_is_a_launch_of_every_operation():
    assert {launch.__name__ for launch in LAUNCHES} == set(OPERATIONS)


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.__name__)
def test_a_launcher_reads_nothing_and_takes_no_memory_but_for_results(
    launch: Callable[[str], Launch], device: str, monkeypatch: pytest.MonkeyPatch
):
    made = launch(device)
    if device == "cuda":
        # a compilation may wait, a launch may not
        made.call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            made.call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with without_kernels(monkeypatch), Watch() as watch:
        made.call()
    allowed = set() if launch.__name__ in TAKES_NO_MEMORY else {"empty"}
    # what this file does with a mask is no launcher's
    allowed |= {"arange"} if launch.__name__ == "full_mask" else set()
    assert set(watch.seen) <= allowed, watch.seen


def test_a_launcher_that_waits_would_be_seen(device: str):
    confidence = torch.zeros(2, 3, device=device)
    with Watch() as watch:
        int(confidence.sum())
        fused.early_stop(confidence, 0.5, 3)
    assert "_local_scalar_dense" in watch.seen and "full" in watch.seen


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.__name__)
def test_a_replay_reads_its_tensors_anew(launch: Callable[[str], Launch], device: str):
    made = launch(device)
    found, before = made.call(), flat(made.judge())
    close(found, made.judge(), made.tolerance)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = made.call()
    for tensor, changed in made.inputs:
        tensor.copy_(changed)
    if device == "cuda":
        graph.replay()
    else:
        found = made.call()
    expected = made.judge()
    close(found, expected, made.tolerance)
    assert not all(torch.equal(a, b) for a, b in zip(before, flat(expected), strict=True)), "nothing changed"


@pytest.mark.parametrize("launch", (score_chain, grow_layer, statistics_of_a_draft), ids=lambda launch: launch.__name__)
def test_twins_in_a_drafts_graph_wait_for_nothing(launch: Callable[[str], Launch], device: str):
    """Where their kernel is wrong, a graph captures the reference; see c2t_kernels/twins.py."""
    made = launch(device)
    with Watch() as watch:
        made.judge()
    # of dtypes alone here; what is made of a number is filled on the device
    assert set(watch.seen) & {*WAITING, "lift_fresh"} <= {"_to_copy"}, watch.seen


def flat(result: Any) -> list[Tensor]:
    """Copies of a result's tensors."""
    return [result.clone()] if isinstance(result, Tensor) else [copy for part in result for copy in flat(part)]


def close(found: Any, expected: Any, tolerance: float) -> None:
    if not isinstance(expected, Tensor):
        for mine, theirs in zip(found, expected, strict=True):
            close(mine, theirs, tolerance)
        return
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
