"""Which kernel wins the contest at start: a right and faster one, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_kernels.attention.reference import tree_attention  # noqa: E402
from c2t_plugin.engines.sglang.verify import contest  # noqa: E402

HEADS = contest.Heads(queries=4, keys=2, dim=16)
WIDTH = 3
SMALL = ((3, 5), (1, 8), (2, 4))


def right(*arguments: Any) -> None:
    """SGLang's arguments, computed by the reference."""
    q, k, v, out, *cache = arguments[:9]
    out.copy_(tree_attention(q, k, v, *cache, scale=arguments[-1]))


def off_by(amount: float, row: int = 0) -> Callable[..., None]:
    def kernel(*arguments: Any) -> None:
        right(*arguments)
        arguments[3][row] += amount

    return kernel


def lazy(*arguments: Any) -> None:
    """Leaves the last row as it was."""
    last = arguments[3][-1].clone()
    right(*arguments)
    arguments[3][-1] = last


def broken(*_: Any) -> None:
    raise RuntimeError("no kernel image for this GPU")


def held(
    monkeypatch: pytest.MonkeyPatch, ours: Any, stock: Any = right, mine: float = 1.0, theirs: float = 2.0
) -> bool:
    """A contest whose clock says so many microseconds in turn."""
    monkeypatch.setattr(contest, "SHAPES", SMALL)
    times = iter([mine, theirs] * len(SMALL))

    def timer(call: Callable[[], Any]) -> float:
        call()
        return next(times)

    return contest.won(ours, stock, HEADS, WIDTH, torch.float32, torch.device("cpu"), timer)


def test_the_faster_one_verifies(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        assert held(monkeypatch, right)
        assert not held(monkeypatch, right, mine=3.0)
    assert "attention tree verifies: tree_attention and SGLang's take 1 and 2 us for 1 x 8 tokens" in caplog.text
    assert "attention stock verifies" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (off_by(1e-3), "tree_attention is off by 0.001"),
        (off_by(float("nan"), row=2), "tree_attention is off by inf"),
        (lazy, "tree_attention is off by inf"),
        (broken, "tree_attention did not run here (RuntimeError: no kernel image for this GPU)"),
    ],
    ids=["another value", "not a number", "a row not written", "does not run"],
)
def test_a_kernel_that_is_wrong_here_never_verifies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: Any, said: str
):
    assert not held(monkeypatch, wrong)
    assert said in caplog.text and "SGLang's kernel verifies" in caplog.text


@pytest.mark.parametrize(("requests", "lengths"), [(1, [3]), (5, [3, 2, 1, 3, 2])])
def test_they_are_launched_as_a_graph_launches_them(requests: int, lengths: list[int]):
    q, _, _, _, _, _, starts, indptr, pages, *_ = contest.batch(
        HEADS, (requests, 8), WIDTH, torch.float32, torch.device("cpu")
    )
    assert len(q) == sum(lengths) and len(starts) == len(indptr) == len(q) + 1
    assert starts.diff().tolist() == lengths + [0] * (len(q) - requests)
    assert indptr.diff().tolist() == [8] * requests + [0] * (len(q) - requests) and len(pages) == 8 * requests


def test_the_error_of_sglangs_own_kernel_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch):
    assert held(monkeypatch, off_by(1e-3), stock=off_by(1e-3))


@pytest.mark.parametrize(
    ("device", "draft", "config"), [("cpu", False, "auto"), ("cuda", True, "auto"), ("cuda", False, "stock")]
)
def test_no_contest_where_there_is_nothing_to_win(
    sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str, draft: bool, config: str
):
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.config import C2TConfig
    from c2t_plugin.engines.sglang.verify import backends, fitness, triton

    monkeypatch.setattr(fitness, "wins", broken)
    monkeypatch.setattr(triton.PackedTritonAttnBackend, "__init__", lambda *_, **__: None)
    runner = SimpleNamespace(device=device, is_draft_worker=draft)
    assert type(backends.packed_triton(C2TConfig(attention=config), runner)) is triton.PackedTritonAttnBackend


@pytest.mark.parametrize("wins", [True, False])
def test_the_winner_is_built(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, wins: bool):
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.config import C2TConfig
    from c2t_plugin.engines.sglang.verify import backends, fitness, tree_attention, triton

    monkeypatch.setattr(fitness, "wins", lambda _: wins)
    monkeypatch.setattr(triton.PackedTritonAttnBackend, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(tree_attention.TreeTritonAttnBackend, "__init__", lambda *_, **given: seen.append(given))
    seen: list[Any] = []
    made = backends.packed_triton(C2TConfig(), SimpleNamespace(device="cuda", is_draft_worker=False))
    assert made.c2t_kernel == ("tree" if wins else "stock")
    assert seen == [{"masked": False, "asked_for": False, "nodes_alone": True}] * wins


def test_chains_of_an_odd_layer_go_to_sglangs_kernel_where_nobody_asked_for_ours(
    sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang.verify.tree_attention import TreeTritonAttnBackend

    backend = TreeTritonAttnBackend.__new__(TreeTritonAttnBackend)
    backend._packed, backend._masked, backend._asked_for = True, False, False
    seen: list[Any] = []
    backend._stock_kernel = lambda *given, **named: seen.append((given, named))  # type: ignore[method-assign]
    arguments = [None] * 10 + [True, None, 1, 1.0, 1.0, 1.0]
    backend._attend(*arguments, logit_cap=30.0)
    assert seen == [(tuple(arguments), {"logit_cap": 30.0})]


def test_a_kernel_is_timed_out_of_a_graph_so_that_its_launch_does_not_count(monkeypatch: pytest.MonkeyPatch):
    """Launched from Python, ours lost on an H200 to a kernel that takes twice as long there."""
    host_us, device_us, launched, clock = 1000.0, 5.0, [], [0.0]

    class Graph:
        def replay(self) -> None:
            clock[0] += device_us * contest.LAUNCHES / 1e3

    class Event(SimpleNamespace):
        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Event) -> float:
            return float(end.at - self.at)

        def synchronize(self) -> None:
            pass

    def call() -> None:
        launched.append(capturing[-1])
        clock[0] += host_us / 1e3

    capturing = [False]

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        capturing.append(True)
        yield
        capturing.pop()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, "graph", capture)
    assert contest.microseconds(call) == pytest.approx(device_us)
    assert launched == [False] * contest.WARM_UP + [True] * contest.LAUNCHES
