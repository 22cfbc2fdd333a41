"""Entry point `vllm.general_plugins`: called in every vLLM process, before arguments are resolved."""

from __future__ import annotations

from c2t_plugin.engines.vllm.patches import LOAD, PATCHES


def register() -> None:
    """Teach vLLM's argument record the method "c2t". Idempotent; an engine that does not ask for it is left alone."""
    PATCHES.apply(LOAD)
