"""Entry point `vllm.general_plugins`: called in every vLLM process, before arguments are resolved."""

from __future__ import annotations

import functools
from typing import Any

from c2t_plugin.engines.vllm import config, contract, metrics
from c2t_plugin.errors import C2TError

# Set on the argument record of a command line: its errors end the process with one line instead of a traceback.
COMMAND_LINE = "_c2t_command_line"


def register() -> None:
    """Teach vLLM's argument record the method "c2t". Idempotent; an engine that does not ask for it is left alone."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config
    if hasattr(stock, "c2t"):
        return

    @functools.wraps(stock)
    def create_engine_config(self: Any, *positional: Any, **keyword: Any) -> Any:
        try:
            return _create(stock, self, *positional, **keyword)
        except C2TError as error:
            if getattr(self, COMMAND_LINE, False):
                raise SystemExit(f"C2T: {error}") from error
            raise

    create_engine_config.c2t = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
    _mark_command_lines(EngineArgs)


def _create(stock: Any, arguments: Any, *positional: Any, **keyword: Any) -> Any:
    import vllm

    options = config.translate(arguments)
    if options is None:
        return stock(arguments, *positional, **keyword)
    contract.check(vllm.__version__)
    vllm_config = stock(arguments, *positional, **keyword)
    config.settle(vllm_config, options)
    metrics.install()
    return vllm_config


def _mark_command_lines(record: Any) -> None:
    stock = record.from_cli_args.__func__

    @functools.wraps(stock)
    def from_cli_args(cls: Any, *positional: Any, **keyword: Any) -> Any:
        arguments = stock(cls, *positional, **keyword)
        setattr(arguments, COMMAND_LINE, True)
        return arguments

    record.from_cli_args = classmethod(from_cli_args)
