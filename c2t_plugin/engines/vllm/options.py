"""What C2T does while vLLM makes an engine's configuration of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from c2t_plugin.engines.patching import ATTRIBUTE
from c2t_plugin.engines.vllm import config, contract, requests
from c2t_plugin.engines.vllm.patches import ENGINE, PATCHES
from c2t_plugin.errors import C2TError


def creating(stock: Callable[..., Any]) -> Callable[..., Any]:
    """EngineArgs.create_engine_config, which knows the method "c2t"; an engine that does not ask is left alone."""

    @functools.wraps(stock)
    def create_engine_config(self: Any, *positional: Any, **keyword: Any) -> Any:
        try:
            return _create(stock, self, *positional, **keyword)
        except C2TError as error:
            if getattr(self, ATTRIBUTE, False):
                raise SystemExit(f"C2T: {error}") from error
            raise

    return create_engine_config


def marking(stock: Callable[..., Any]) -> Callable[..., Any]:
    """EngineArgs.from_cli_args, which marks its records as those of a command line.

    Their errors end the process with one line instead of a traceback.
    """

    @functools.wraps(stock)
    def from_cli_args(cls: Any, *positional: Any, **keyword: Any) -> Any:
        arguments = stock(cls, *positional, **keyword)
        setattr(arguments, ATTRIBUTE, True)
        return arguments

    return from_cli_args


def _create(stock: Any, arguments: Any, *positional: Any, **keyword: Any) -> Any:
    import vllm

    options = config.translate(arguments)
    if options is None:
        return stock(arguments, *positional, **keyword)
    contract.check(vllm.__version__)
    vllm_config = stock(arguments, *positional, **keyword)
    requests.allow(config.settle(vllm_config, options).request_settings)
    PATCHES.apply(ENGINE)
    PATCHES.check()
    return vllm_config
