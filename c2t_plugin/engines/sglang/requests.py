"""What one request may ask of C2T: `"custom_params": {"c2t": {"enabled": false, "beta": 0.3, "max_depth": 2}}`.

SGLang carries `custom_params` of every route to the scheduler as it is. It is checked where SGLang checks sampling
parameters, so that a bad value is answered with status 400 before the request meets a batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from c2t_plugin.config import THRESHOLDS
from c2t_plugin.engines.sglang import args
from c2t_plugin.errors import ConfigError
from c2t_plugin.limits import RequestLimits

KEY = "c2t"


@dataclass(frozen=True)
class RequestOptions:
    """One request's own settings; None means the server's.

    enabled: False verifies every draft token, as a static chain does. beta: in [0, 1]. max_depth: at most so many draft
    tokens are verified, 0 or more; what exceeds the server's own longest chain is that one.
    """

    enabled: bool = True
    beta: float | None = None
    max_depth: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"c2t.enabled must be true or false, got {self.enabled!r}")
        if self.beta is not None and not (_is_number(self.beta) and 0.0 <= self.beta <= 1.0):
            raise ConfigError(f"c2t.beta must be a number in [0, 1], got {self.beta!r}")
        depth = self.max_depth
        if depth is not None and not (_is_number(depth) and depth >= 0 and depth == int(depth)):
            raise ConfigError(f"c2t.max_depth must be a whole number of at least 0, got {depth!r}")
        if not self.enabled and self.beta is not None:
            raise ConfigError("c2t.beta has no meaning with c2t.enabled false; leave one of them out")

    @classmethod
    def of(cls, custom_params: Any) -> RequestOptions:
        """The options in a request's custom_params, which may be None. Raises ConfigError, naming the key."""
        options = custom_params.get(KEY) if isinstance(custom_params, Mapping) else None
        if options is None:
            return cls()
        known = [item.name for item in fields(cls)]
        if not isinstance(options, Mapping):
            raise ConfigError(f"custom_params.c2t must be an object with some of {', '.join(known)}, got {options!r}")
        unknown = sorted(str(name) for name in options if name not in known)
        if unknown:
            raise ConfigError(f"custom_params.c2t has no {', '.join(unknown)}; it takes {', '.join(known)}")
        return cls(**options)

    @property
    def threshold(self) -> float | None:
        """The beta to cut at; 0 cuts nothing."""
        return self.beta if self.enabled else 0.0

    @property
    def longest(self) -> int | None:
        """max_depth as an integer."""
        return None if self.max_depth is None else min(int(self.max_depth), 2**31 - 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def set_options(scorer: RequestLimits, slots: Tensor, reqs: Sequence[Any]) -> None:
    """Give the scorer what SGLang's requests in these slots ((n,) int64, on its device) ask for.

    Notes on each whether it has a threshold of its own, which would else be read off its parameters in every step.
    """
    options = [RequestOptions.of(req.sampling_params.custom_params) for req in reqs]
    for req, each in zip(reqs, options, strict=True):
        req.c2t_own_beta = each.threshold is not None
    scorer.set_requests(slots, [each.threshold for each in options], [each.longest for each in options])


@functools.cache
def register() -> None:
    """Hook SGLang's check of sampling parameters. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.sampling.sampling_params.SamplingParams.verify", _check, HookType.AFTER)


def _check(result: None, params: Any, *_: Any, **__: Any) -> None:
    from sglang.srt.runtime_context import get_server_args

    # Read here and not once: an extra tokenizer worker has its plugins before it knows its server's arguments.
    server_args = get_server_args()
    # Of another algorithm's requests the key may be somebody else's.
    if not args.asks_for_c2t(server_args):
        return
    # ConfigError is a ValueError, which SGLang answers with status 400.
    asked = RequestOptions.of(params.custom_params)
    if asked.beta is not None and args.config_of(server_args).policy not in THRESHOLDS:
        raise ConfigError("c2t.beta has no meaning here: this server's trees are not cut by a threshold")
