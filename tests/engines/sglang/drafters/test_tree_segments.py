"""The captured draft loop in segments: SGLang's own capture and replay, over stubs for CUDA's graphs and events.

Longer than most files, as the stub for a captured graph is in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.engines.sglang.metrics import Counts  # noqa: E402
from c2t_plugin.engines.sglang.parts import Parts  # noqa: E402
from tests.engines.sglang import test_tree_policies as policies  # noqa: E402

TOPK, DEPTH = 3, 5
NEVER = 99
# Slots of the requests; none has slot 0, which is where SGLang's pads are.
REQUESTS = (4, 1, 6)
ROWS = 500
# Drafts of one server, one after the other: threshold, and which of the made-up prompts.
DRAFTS = ((0.0, 0), (0.12, 3), (1.0, 6), (0.04, 9), (0.0, 12), (0.3, 15), (0.07, 18), (0.02, 21))
# The device's answer to these is known to the host only when it waits.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2")


class Graph(TorchDispatchMode):
    """For torch.cuda.CUDAGraph: keeps the operations that it sees, with their tensors, and runs them again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.memory: list[Tensor] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__.split(".")[0] not in WAITS, f"{func} waits for the device"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self.memory += [
            t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given
        ]
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            for old, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != value.data_ptr():
                    old.copy_(value)

    def overwrite(self) -> None:
        """What another graph of the same memory pool does to this one's tensors."""
        for tensor in self.memory:
            tensor.fill_(1)

    def reset(self) -> None:
        self.calls.clear()


class Event:
    """For torch.cuda.Event: has happened once `lag` later ones were recorded, or once it was waited for."""

    lag: ClassVar[int] = 0
    recorded: ClassVar[int] = 0
    waits: ClassVar[int] = 0

    def record(self) -> None:
        Event.recorded += 1
        self.at, self.awaited = Event.recorded, False

    def query(self) -> bool:
        return self.awaited or Event.recorded - self.at >= self.lag

    def synchronize(self) -> None:
        Event.waits += 1
        self.awaited = True


class DraftModel:
    """Its words depend on the tokens in the branch's own slots and on the hidden state above, in tensors alone."""

    def __init__(self, requests: int, pool: Any) -> None:
        self.token_to_kv_pool = pool
        self.model_config = SimpleNamespace(model_is_mrope=False)
        self.slots = torch.arange(requests * TOPK * DEPTH).view(requests, TOPK, DEPTH)
        self.words = 3 * torch.randn(ROWS, policies.VOCAB, generator=torch.Generator().manual_seed(5))
        self.places = 31 ** torch.arange(DEPTH)
        self.forwards = 0

    def forward(self, batch: Any) -> Any:
        written = self.forwards % (DEPTH - 1) + 1
        self.forwards += 1
        keys = self.token_to_kv_pool.k_buffer[0]
        keys[batch.out_cache_loc, 0] = batch.input_ids.float()
        path = keys[self.slots[:, :, :written]][..., 0].long()
        row = ((path * self.places[:written]).sum(-1).flatten() + 7 * batch.spec_info.hidden_states[:, 0]) % ROWS
        logits = SimpleNamespace(next_token_logits=self.words[row + 0 * batch.positions], hidden_states=row[:, None])
        return SimpleNamespace(logits_output=logits)


class Server:
    """A tree draft worker, what SGLang's runner does around its loop, and the backend that captures it."""

    def __init__(self, tree: Any, segments: Any, name: str = "prob", slots: tuple[int, ...] = REQUESTS) -> None:
        pool = object.__new__(tree.MHATokenToKVPool)
        size = len(slots) * TOPK * DEPTH
        pool.k_buffer, pool.v_buffer = [torch.zeros(size, 1)], [torch.zeros(size, 1)]
        self.model = DraftModel(len(slots), pool)
        worker = SimpleNamespace(
            draft_runner=self.model,
            topk=TOPK,
            speculative_num_steps=DEPTH,
            draft_attn_backend=SimpleNamespace(attn_backends=[object()] * (DEPTH - 1)),
        )
        scorer = policies.grower(name, TOPK, DEPTH, TOPK * DEPTH)
        self.parts = Parts(scorer, Counts(TOPK * DEPTH), None, None, {"policy": name})
        self.made = made = tree.TreeDrafter(worker, self.parts)
        self.slots = torch.tensor(slots)
        self.batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            out_cache_loc=self.model.slots.flatten(),
            req_pool_indices=self.slots,
            positions=torch.zeros(len(slots) * TOPK, dtype=torch.int64),
            spec_info=SimpleNamespace(hidden_states=torch.arange(len(slots))[:, None]),
            moe_num_token_non_padded=None,
        )
        self.backend = segments.divide(stock_backend(segments), made)
        self.key = key_of(len(slots))

    def run_once(self) -> Any:
        where, hidden = self.batch.out_cache_loc, self.batch.spec_info.hidden_states
        trees = self.made.loop(self.batch, None)
        self.batch.out_cache_loc, self.batch.spec_info.hidden_states = where, hidden
        self.batch.positions.sub_(DEPTH - 1)
        return trees

    def capture(self) -> Any:
        self.backend.capture_one(self.key, self.run_once)
        return self.backend._graphs[self.key]

    def prompt(self, beta: float, number: int) -> None:
        self.made.scorer.set_beta(beta)
        real = self.slots[self.slots > 0]
        self.made.scorer.write_seed(real, self.model.words[number : number + len(real)])
        self.batch.positions.fill_(number)

    def eager(self) -> tuple[list[Tensor], int]:
        """The trees of the whole loop, and after how many layers no node was left."""
        left: list[bool] = []
        self.made.between_layers = lambda: left.append(bool(self.made.scorer.alive))
        trees = normal(self.run_once())
        del self.made.between_layers
        return trees, [*left, False].index(False) + 1


def key_of(size: int) -> Any:
    from sglang.srt.model_executor.runner.shape_key import ShapeKey

    return ShapeKey(size)


def stock_backend(segments: Any) -> Any:
    """SGLang's, made without a device."""
    backend = object.__new__(segments.FullCudaGraphBackend)
    backend._graphs, backend._outputs = {}, {}
    backend._pool = backend._capture_stream = None
    backend._cuda_graph_runner = SimpleNamespace()
    backend._tp_group = SimpleNamespace(barrier=lambda: None)
    backend._precarve = SimpleNamespace(measure=contextlib.nullcontext, mint=lambda: None)
    backend._reuse_output_buffer = False
    backend._memory_saver_adapter = SimpleNamespace(enabled=False)
    backend._device_module = SimpleNamespace(
        synchronize=lambda: None, graph=lambda *, cuda_graph, pool, stream: cuda_graph
    )
    return backend


def normal(trees: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies, in which a dead column says nothing else."""
    keep = trees[1]
    return [keep.clone(), *(values.masked_fill(~keep, 0) for values in (trees[0], *trees[2:]))]


@pytest.fixture
def tree(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang.drafters import tree

    return tree


@pytest.fixture
def segments(tree: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from c2t_plugin.engines.sglang.drafters import segments

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "waits", 0)
    return segments


def check(server: Server, graph: Any, allowed: int, overwritten: bool = True) -> set[int]:
    """Each draft has the eager loop's trees and just the allowed layers after its end; how many layers there were."""
    lengths = set()
    for beta, number in DRAFTS:
        server.prompt(beta, number)
        expected, layers = server.eager()
        server.prompt(beta, number)
        keys = server.model.token_to_kv_pool.k_buffer[0].fill_(NEVER)
        for segment in graph._segments:
            segment.replays = 0
            if overwritten:
                segment.overwrite()
        found = normal(server.backend.replay(server.key, None))
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs), "another tree"
        launched = [segment.replays for segment in graph._segments]
        needed = min(layers + allowed, DEPTH)
        assert launched == [1] * needed + [0] * (DEPTH - needed) + [1], "another number of layers"
        assert (keys.view(-1, TOPK, DEPTH)[:, :, needed - 1 :] == NEVER).all(), "keys of a layer that was not drafted"
        lengths.add(layers)
    return lengths


@pytest.mark.parametrize("lag", [0, 1, 2, NEVER])
@pytest.mark.parametrize("name", ["prob", "c2t"])
def test_segments_draw_the_trees_of_the_whole_loop(
    tree: Any, segments: Any, monkeypatch: pytest.MonkeyPatch, lag: int, name: str
):
    """Later flags cost layers, as many as they are late, and change no tree."""
    monkeypatch.setattr(Event, "lag", lag)
    server = Server(tree, segments, name)
    graph = server.capture()
    assert len(graph._segments) == DEPTH + 1
    assert len(check(server, graph, lag)) >= 3, "drafts that end after different layers"
    assert Event.waits == 0


def test_where_a_step_waits_anyway_it_waits_for_the_segment_before_the_last(
    tree: Any, segments: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Event, "lag", NEVER)
    server = Server(tree, segments)
    graph = server.capture()
    server.parts.packing = SimpleNamespace()
    check(server, graph, 1)
    assert Event.waits > 0


def test_rows_that_pad_a_batch_keep_no_draft_going(tree: Any, segments: Any):
    server = Server(tree, segments, slots=(4, 0, 0))
    check(server, server.capture(), 0)


def flags_of_the_layer_after(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph._alive.append(graph._alive.pop(0))


def flags_sent_once(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    send, sent = graph._flags.send, set()

    def once(segment: int, alive: Tensor) -> None:
        send(segment, torch.tensor(True) if segment in sent else alive)
        sent.add(segment)

    monkeypatch.setattr(graph._flags, "send", once)


def trees_not_emptied(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, columns = graph._segments[0], TOPK + (DEPTH - 1) * TOPK**2
    emptying = [call for call in first.calls if call[0].__name__.split(".")[0] in ("zeros", "full")]
    emptying = [call for call in emptying if call[3].shape[1:] == (columns,)]
    assert len(emptying) == 4
    first.calls = [call for call in first.calls if not any(call is other for other in emptying)]


FAULTS = (flags_of_the_layer_after, flags_sent_once, trees_not_emptied)


@pytest.mark.parametrize("overwritten", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    tree: Any, segments: Any, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], overwritten: bool
):
    server = Server(tree, segments)
    graph = server.capture()
    check(server, graph, 0, overwritten)
    fault(graph, monkeypatch)
    with pytest.raises(AssertionError, match="another"):
        check(server, graph, 0, overwritten)


def test_a_large_batch_has_one_graph(tree: Any, segments: Any):
    server = Server(tree, segments, slots=(4, 1, 6, 2, 3))
    graph = server.capture()
    assert len(server.slots) == segments.EARLY_END_BATCH + 1 and isinstance(graph, Graph)


def test_other_ways_to_record_are_left_as_they_are(segments: Any):
    saving = stock_backend(segments)
    saving._memory_saver_adapter.enabled = True
    for backend in (saving, object.__new__(type("Other", (segments.FullCudaGraphBackend,), {}))):
        assert "capture_one" not in vars(segments.divide(backend, None))


def test_a_failed_recording_leaves_nothing_behind(tree: Any, segments: Any, monkeypatch: pytest.MonkeyPatch):
    server = Server(tree, segments)
    module = server.backend._device_module
    warm = iter([1, 1, 0])
    monkeypatch.setattr(server.made.scorer, "end", lambda: 1 / next(warm))
    with pytest.raises(ZeroDivisionError):
        server.capture()
    assert "between_layers" not in vars(server.made) and server.backend._device_module is module
    assert not server.backend._graphs


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_a_single_rank_records_in_segments(tree: Any, segments: Any, monkeypatch: pytest.MonkeyPatch, ranks: int):
    from c2t_plugin.engines.sglang import ranks as process_group

    runners = tree.eagle_draft_cuda_graph_runner
    monkeypatch.setattr(runners, "resolve_decode_backend", lambda runner: stock_backend(segments))
    monkeypatch.setattr(process_group, "get_tp_group", lambda: SimpleNamespace(world_size=ranks))
    stock = runners.resolve_decode_backend

    drafter = Server(tree, segments).made
    with drafter.capturing():
        backend = runners.resolve_decode_backend("the runner")
    assert ("capture_one" in vars(backend)) == (ranks == 1)
    assert runners.resolve_decode_backend is stock
