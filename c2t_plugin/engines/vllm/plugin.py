"""Entry point `vllm.general_plugins`: called in every vLLM process, before arguments are resolved."""

from __future__ import annotations

import logging

from c2t_plugin.engines.vllm.patches import LOAD, PATCHES


def register() -> None:
    """Teach vLLM's argument record the method "c2t". Idempotent; an engine that does not ask for it is left alone."""
    log_as_vllm()
    PATCHES.apply(LOAD)


def log_as_vllm() -> None:
    """Have what the engines share say where vLLM does: it sets up the logger of its own name alone."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("c2t_plugin")
    if theirs.handlers and not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), theirs.propagate
        ours.setLevel(theirs.level)
