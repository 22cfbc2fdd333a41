"""A GPU that is not there: tensors that pass for a GPU's, and a count of what is done with them.

Real numbers flow, so that code takes the paths and shapes that it takes on a GPU. Counted are launches of Triton
kernels, torch operations that are no view and no allocation, and waits: whatever makes the host ask the device for a
value, or copies without `non_blocking`. A dispatch mode alone misses most of these, since on CPU tensors `.cpu()` and
`.tolist()` dispatch nothing and `a[mask]` is an index like any other.

Triton's interpreter has to be on before a kernel is imported: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)

# Their result, or its shape, is known only when the device is done.
_WAITS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
_WAITS |= {"nonzero", "argwhere", "masked_select", "equal", "allclose", "unique", "unique_consecutive", "bincount"}
# Views and new memory, or what only Triton's interpreter and torch's own bookkeeping do.
_FREE: tuple[str, ...] = ("empty", "new_empty", "detach", "lift_fresh", "alias", "set_")
_FREE += ("_local_scalar_dense", "_reshape_alias", "_unsafe_view")
_FROM_LISTS = ("tensor", "as_tensor", "asarray", "scalar_tensor")


class OnGpu(Tensor):
    """A CPU tensor that says of itself that it is a GPU's; what is computed from one is one too."""

    is_cuda = True
    is_cpu = False
    device = GPU

    def record_stream(self, stream: Any) -> None:
        """There is one stream."""


class OperationCounter(TorchFunctionMode):
    """Within `with OperationCounter() as counter`, "cuda" is a device, and what is asked of it is counted.

    counts: how often each operation was dispatched, by part, see `part`; waits: the same of waits.
    """

    def __init__(self, *, on_host: bool = False) -> None:
        """on_host: torch's operations of CPU tensors are counted too."""
        super().__init__()
        self._on_host = on_host
        self.counts: dict[str, Counter[str]] = {}
        self.waits: dict[str, Counter[str]] = {}
        self.steps = 0
        self._part: str | None = None
        self._on_gpu = False
        self._dispatches = _Dispatches(self._dispatched)
        self._stack = contextlib.ExitStack()

    def forget(self) -> None:
        """Count from here."""
        for each in (*self.counts.values(), *self.waits.values()):
            each.clear()

    def next_step(self) -> None:
        """From here on what was recorded is of a step before."""
        self.steps += 1

    def __enter__(self) -> OperationCounter:
        super().__enter__()
        self._stack.enter_context(patch.object(torch.cuda, "Event", lambda **_: _Event(self)))
        self._stack.enter_context(patch.object(torch.cuda, "current_stream", lambda _: None))
        self._stack.enter_context(self._dispatches)
        self._stack.enter_context(_interpreted(self._launched))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()
        super().__exit__(*raised)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done within counts for this part; nothing does outside of all parts."""
        before, self._part = self._part, name
        self.counts.setdefault(name, Counter())
        self.waits.setdefault(name, Counter())
        try:
            yield
        finally:
            self._part = before

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is done within is not C2T's."""
        before, self._part = self._part, None
        try:
            yield
        finally:
            self._part = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        name = getattr(func, "__name__", str(func))
        if name == "__get__" or func is torch.device:
            return func(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        here = any(isinstance(each, OnGpu) for each in given)
        there = any(_is_gpu(each) for each in given)
        to_host = here and (name == "cpu" or (name == "to" and _names_host(args[1:], kwargs)))
        self._note_wait(name, args, kwargs, here, there, to_host)
        before, self._on_gpu = self._on_gpu, self._on_gpu or here or there
        try:
            args, kwargs = tree_map(_on_the_cpu, (args, kwargs))
            result = func(*args, **kwargs)
        finally:
            self._on_gpu = before
        return tree_map(lambda each: _as(each, OnGpu, not to_host), result) if here or there else result

    def _note_wait(self, name: str, args: Any, kwargs: Any, here: bool, there: bool, to_host: bool) -> None:
        crossing = to_host or (there and not here and (name == "to" or name in _FROM_LISTS))
        if name == "copy_" and here:
            crossing = not all(isinstance(each, OnGpu) for each in args[:2])
        blocks = crossing and not kwargs.get("non_blocking", False)
        if blocks or (here and (name in _WAITS or _masks(name, args) or _repeats(name, args, kwargs))):
            self._add(self.waits, name)
        if crossing and name != "copy_":
            # which dispatches nothing where it goes nowhere
            self._add(self.counts, "copy over the bus")

    def _dispatched(self, func: Any) -> None:
        name = func.overloadpacket.__name__
        if (self._on_gpu or self._on_host) and not _is_view(func) and not name.startswith(_FREE):
            self._add(self.counts, name)

    def _launched(self, name: str) -> None:
        self._add(self.counts, name)

    def _add(self, to: dict[str, Counter[str]], name: str) -> None:
        if self._part is not None:
            to[self._part][name] += 1


class _Event:
    """A CUDA event. To wait for one of this step is a wait; what was recorded a step ago has come to pass."""

    def __init__(self, counter: OperationCounter) -> None:
        self._counter, self._recorded = counter, counter.steps

    def record(self) -> None:
        self._recorded = self._counter.steps

    def query(self) -> bool:
        """It has, so that whatever follows from that is counted. To ask is no wait."""
        return True

    def elapsed_time(self, later: _Event) -> float:
        """Nobody's clock."""
        return 0.0

    def synchronize(self) -> None:
        if self._recorded == self._counter.steps:
            self._counter._add(self._counter.waits, "event")


class _Dispatches(TorchDispatchMode):
    def __init__(self, hear: Callable[[Any], None]) -> None:
        super().__init__()
        self._hear = hear

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._hear(func)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _interpreted(hear: Callable[[str], None]) -> Iterator[None]:
    """Every launch is one, whatever the interpreter does for it."""
    from triton.runtime.interpreter import GridExecutor

    stock = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        hear(self.fn.__name__)
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            plain = {name: _as(each, Tensor) for name, each in kwargs.items()}
            stock(self, *(_as(each, Tensor) for each in args), **plain)

    GridExecutor.__call__ = launch
    try:
        yield
    finally:
        GridExecutor.__call__ = stock


def _as(value: Any, kind: type[Tensor], wanted: bool = True) -> Any:
    if not isinstance(value, Tensor):
        return value
    with torch._C.DisableTorchFunction():
        return value.as_subclass(kind if wanted else Tensor)


def _is_gpu(value: Any) -> bool:
    return isinstance(value, torch.device | str) and str(value).startswith("cuda")


def _on_the_cpu(value: Any) -> Any:
    return torch.device("cpu") if _is_gpu(value) else value


def _names_host(args: Any, kwargs: Any) -> bool:
    named = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device | str)]
    return any(str(each).startswith("cpu") for each in named)


def _masks(name: str, args: Any) -> bool:
    """Whether the host has to know how many elements of a mask are True, or sends what it indexes by."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    indices = tree_leaves(args[1])
    listed = isinstance(args[1], list) or (isinstance(args[1], tuple) and any(isinstance(i, list) for i in args[1]))
    tensors = [each for each in indices if isinstance(each, Tensor)]
    moved = name == "__setitem__" and not isinstance(args[0], OnGpu)
    foreign = any(not isinstance(each, OnGpu) for each in tensors)
    return listed or moved or foreign or any(each.dtype == torch.bool for each in tensors)


def _repeats(name: str, args: Any, kwargs: Any) -> bool:
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    return name == "repeat_interleave" and isinstance(repeats, Tensor) and kwargs.get("output_size") is None


def _is_view(func: Any) -> bool:
    shared = [each.alias_info for each in func._schema.returns if each.alias_info is not None]
    return bool(shared) and not any(each.is_write for each in shared)
