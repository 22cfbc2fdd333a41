"""The captured draft loop in segments, one CUDA graph for each layer, so that it can end early there too.

SGLang captures the loop as one graph, which runs to its end whatever comes of it. For small batches the recording of
that graph is cut between layers here. Its pieces share SGLang's memory pool, lie in its table as one graph, and are
replayed in turn; after each, a flag travels to the host that says whether there is a node left to draft from.

The host launches segments ahead of the device, so the newest flag that it can read is of an earlier segment than the
last one launched. A layer launched in vain costs its time and changes no tree: from dead nodes nothing grows, and the
columns of layers that were not drafted are dead (TreeGrower).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from torch import Tensor

from c2t_plugin.engines.sglang.patches import CAPTURE_ONE, DEVICE_MODULE, PATCHES

# In larger batches some tree is nearly always alive, and asking has its price: a wait, or a launch for each layer.
EARLY_END_BATCH = 4


class Drafts(Protocol):
    """The drafter of trees, as far as it matters here.

    waits: whether the host waits for every draft anyway. between_layers: what the draft loop calls before each layer
    but the first, and before it closes the trees.
    """

    scorer: Any

    @property
    def waits(self) -> bool: ...

    def between_layers(self) -> None: ...


class Flags:
    """What the device said after each segment of one draft, on the host."""

    def __init__(self, segments: int) -> None:
        self._host = torch.empty(segments, dtype=torch.bool, pin_memory=True)
        self._copied = [torch.cuda.Event() for _ in range(segments)]

    def send(self, segment: int, alive: Tensor) -> None:
        """Start the copy of this segment's flag, one bool, behind what was launched so far."""
        self._host[segment].copy_(alive, non_blocking=True)
        self._copied[segment].record()

    def alive(self, sent: int, wait: bool) -> bool:
        """The newest flag that has arrived of the first `sent`; True if none has.

        wait: for that of the segment before the last, while the device has the last one to do.
        """
        if wait and sent > 1:
            self._copied[sent - 2].synchronize()
        newest = next((segment for segment in reversed(range(sent)) if self._copied[segment].query()), None)
        return newest is None or bool(self._host[newest])


class SegmentedGraph:
    """What stands in SGLang's table in the place of one CUDAGraph."""

    def __init__(self, drafts: Drafts, device_module: Any) -> None:
        """device_module: torch.cuda; its `graph` records."""
        self._drafts, self._device_module = drafts, device_module
        self._segments: list[Any] = []
        self._alive: list[Tensor] = []
        self._flags: Flags | None = None

    @contextlib.contextmanager
    def recording(self, *, cuda_graph: Any, **where: Any) -> Iterator[None]:
        """As torch.cuda.graph; cuda_graph: an empty one, for the first segment."""
        with contextlib.ExitStack() as recorder:

            def begin(graph: Any) -> None:
                recorder.enter_context(self._device_module.graph(cuda_graph=graph, **where))
                self._segments.append(graph)

            def cut() -> None:
                self._alive.append(self._drafts.scorer.alive)
                recorder.close()
                begin(torch.cuda.CUDAGraph())

            begin(cuda_graph)
            self._drafts.between_layers = cut  # type: ignore[method-assign]
            try:
                yield
            finally:
                del self._drafts.between_layers
        # Memory is pinned when nothing is being recorded.
        self._flags = Flags(len(self._alive))

    def replay(self) -> None:
        """Launch the layers up to the last one that may be needed, and the end."""
        assert self._flags is not None
        *layers, end = self._segments
        for sent, (segment, alive) in enumerate(zip(layers, self._alive, strict=True)):
            if not self._flags.alive(sent, self._drafts.waits):
                break
            segment.replay()
            self._flags.send(sent, alive)
        end.replay()

    def reset(self) -> None:
        """As that of a CUDAGraph."""
        for segment in self._segments:
            segment.reset()


def divide(backend: Any, drafts: Drafts) -> Any:
    """Have the backend with which SGLang captures the draft loop do so in segments for batches up to EARLY_END_BATCH.

    Other kinds of backend, and one that saves its memory, are left as they are. Returns the backend.
    """
    if type(backend) is not FullCudaGraphBackend or backend._memory_saver_adapter.enabled:
        return backend
    PATCHES.on(CAPTURE_ONE, backend, lambda capture: functools.partial(_capture_one, capture, backend, drafts))
    return backend


def _capture_one(capture: Any, backend: Any, drafts: Drafts, shape_key: Any, *positional: Any, **keyword: Any) -> None:
    """SGLang's own, with the recording of a small batch cut into segments."""
    if shape_key.size > EARLY_END_BATCH:
        capture(shape_key, *positional, **keyword)
        return
    module = backend._device_module
    made = SegmentedGraph(drafts, module)
    recorder = types.SimpleNamespace(synchronize=module.synchronize, graph=made.recording)
    with PATCHES.during(DEVICE_MODULE, recorder, owner=backend):
        capture(shape_key, *positional, **keyword)
    backend._graphs[shape_key] = made
