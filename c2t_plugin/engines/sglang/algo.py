"""C2T as speculative algorithms of SGLang: each behaves as its base in everything but the worker.

SGLang dispatches on predicates of the algorithm (`is_eagle()`, ...). A registered algorithm answers False to all of
them and lacks some that the scheduler calls, so these classes delegate every public method of the enum to a base
member. The base travels in the name (C2T_EAGLE3), so that each process decides alike. Plain C2T becomes one of them
when arguments are resolved (validate.py).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

GENERIC = "C2T"
BASES = ("EAGLE", "EAGLE3", "STANDALONE")
# What plain C2T answers until its base is known; the name is replaced before any worker exists.
_UNRESOLVED_BASE = "EAGLE3"


def register() -> None:
    """Register C2T, C2T_EAGLE, C2T_EAGLE3 and C2T_STANDALONE. Idempotent."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    for name, base in ((GENERIC, _UNRESOLVED_BASE), *((f"{GENERIC}_{base}", base) for base in BASES)):
        if get_spec(name) is None:
            SpeculativeAlgorithm.register(
                name,
                supports_overlap=True,
                validate_server_args=_validate,
                spec_class=algorithm_class(base),
            )(functools.partial(_worker_class, base))


def _validate(server_args: Any) -> None:
    # where arguments are resolved, which is not where they are served with
    from c2t_plugin.engines.sglang.validate import validate

    validate(server_args)


def algorithm_class(base_name: str) -> type:
    """A CustomSpecAlgo whose public methods are the base member's."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    base = SpeculativeAlgorithm[base_name]
    body: dict[str, Any] = {
        name: _delegate(method, base)
        for name, method in vars(SpeculativeAlgorithm).items()
        if isinstance(method, types.FunctionType) and not name.startswith("_") and name != "create_worker"
    }
    body["handle_server_args"] = _handle_server_args
    body["supports_ragged_verify"] = lambda self: self.packing is not None
    body["build_disagg_draft_input"], body["take_over"] = _build_disagg_draft_input, _take_over
    body["base"] = base
    # Slots and requests that were prefilled elsewhere and that the worker has not taken over yet.
    body["prebuilt"] = []
    # By which choice this process captures its target graphs for packed rows; verify/choice.py says so.
    body["packing"] = None
    return type(f"C2T{base_name.title()}Algorithm", (CustomSpecAlgo,), body)


def _delegate(method: Callable[..., Any], base: Any) -> Callable[..., Any]:
    def delegated(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(base, *args, **kwargs)

    delegated.__name__ = method.__name__
    delegated.__doc__ = method.__doc__
    return delegated


def _build_disagg_draft_input(algorithm: Any, batch: Any, *positional: Any, **keyword: Any) -> Any:
    algorithm.prebuilt.append((batch.req_pool_indices_cpu, list(batch.reqs)))
    return algorithm.base.build_disagg_draft_input(batch, *positional, **keyword)


def _take_over(algorithm: Any, parts: Any, device: Any) -> None:
    if algorithm.prebuilt:
        from c2t_plugin.engines.sglang.prebuilt import take_over

        take_over(algorithm, parts, device)


def _handle_server_args(_self: Any, server_args: Any) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    # `validate` has put the resolved name into the record, so this also serves plain C2T.
    resolved = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)
    resolved.base.handle_server_args(server_args)


def _worker_class(base: str, server_args: Any) -> type:
    from c2t_plugin.engines.sglang import worker
    from c2t_plugin.engines.sglang.patches import PATCHES, WORKER

    # before the scheduler binds its handlers and builds attention backends
    PATCHES.apply(WORKER)
    PATCHES.require()
    return worker.worker_class(base)
