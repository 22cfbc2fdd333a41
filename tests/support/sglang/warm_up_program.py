"""Which forms of kernels steps launch outside of graphs that nothing launched before, for test_warm_up.py.

Usage: python warm_up_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1. A form is what
Triton compiles anew: types, what is None, what of numbers and addresses it looks at, and constants.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.operations import chains, trees
from benchmarks.operations.counter import GPU, OperationCounter
from benchmarks.operations.steps import DEPTH, HIDDEN, IN_GRAPHS, VOCABULARY
from c2t_plugin.engines.sglang import warm_up

# the largest batch of the server, and those that are served
MOST, REQUESTS = 17, (1, 5, 17)


@contextmanager
def recorded() -> Iterator[set[str]]:
    """The forms that are launched within."""
    found: set[str] = set()
    run = InterpretedFunction.run

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        loose = self.kwargs.get("do_not_specialize") or ()
        unaligned = self.kwargs.get("do_not_specialize_on_alignment") or ()
        seen = [f"{name}: {_seen(given[name], name in loose, name in unaligned)}" for name in self.arg_names]
        found.add(f"{self.__name__}({', '.join(seen)}, warps {kwargs.get('num_warps')})")
        return run(self, *args, **kwargs)

    with patch.object(InterpretedFunction, "run", recording):
        yield found


def _seen(value: Any, loose: bool, unaligned: bool) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{'' if unaligned or value.data_ptr() % 16 else ' aligned'}"
    if isinstance(value, int) and not isinstance(value, bool) and loose:
        return "number"
    return str(value)


def worker_of(steps: Any) -> Any:
    """What the warm-up asks of a worker."""
    target = steps._target
    runner = target.model_runner
    runner.dtype, runner.spec_algorithm = torch.float32, SimpleNamespace(is_standalone=lambda: False)
    runner.model_config = SimpleNamespace(model_is_mrope=False, vocab_size=VOCABULARY)
    drafting = vars(steps._drafter._worker)
    draft = SimpleNamespace(
        drafter=steps._drafter,
        draft_runner=None,
        hot_token_id=range(VOCABULARY),
        tree_mask_mode=drafting.get("tree_mask_mode"),
    )
    return SimpleNamespace(
        c2t=steps._drafter._parts,
        device=GPU,
        req_to_token_pool=SimpleNamespace(size=MOST),
        adaptive_controller=SimpleNamespace(depths=(0, 2, DEPTH)),
        speculative_num_draft_tokens=drafting.get("speculative_num_draft_tokens", DEPTH + 1),
        speculative_num_steps=DEPTH,
        topk=trees.TOP_K,
        _draft_worker=draft,
        target_worker=target,
    )


def of_steps(made: Callable[[OperationCounter], Any]) -> tuple[set[str], set[str]]:
    """Forms of the warm-up of a server, and of the steps of servers with any number of requests."""
    with OperationCounter() as counter, chains.stand_ins(), sized(MOST):
        worker = worker_of(made(counter))
        with recorded() as warm, patch.object(warm_up, "get_draft_input_from_target_hidden_dim", lambda _: HIDDEN):
            warm_up.every_form(worker)
    served: set[str] = set()
    for requests in REQUESTS:
        with OperationCounter() as counter, chains.stand_ins(), sized(requests):
            steps = made(counter)
            begun = counter.part

            @contextmanager
            def part(name: str, begun: Any = begun) -> Iterator[None]:
                with begun(name), recorded() as found:
                    yield
                served.update(() if name in IN_GRAPHS else found)

            with patch.object(counter, "part", part):
                steps.step()
    return warm, served


@contextmanager
def sized(requests: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (chains, trees):
            stack.enter_context(patch.multiple(module, REQUESTS=requests, REQUEST_SLOTS=MOST + 1))
        yield


def main(output: Path) -> None:
    makers: dict[str, Callable[[OperationCounter], Any]] = {}
    for kind, modes in ((chains.ChainSteps, chains.MODES), (trees.TreeSteps, trees.MODES)):
        makers |= {mode: partial(kind, mode=mode) for mode in modes}
    found = {}
    for mode, made in makers.items():
        warm, served = of_steps(made)
        found[mode] = {"warm": sorted(warm), "served": sorted(served), "cold": sorted(served - warm)}
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
