"""Entry point `sglang.srt.plugins`: called in every SGLang process, before arguments are parsed."""

from __future__ import annotations

from c2t_plugin import envs
from c2t_plugin.errors import C2TError


def register() -> None:
    """Register C2T's algorithms and options with SGLang. Idempotent; imports no worker.

    SGLang logs and swallows any Exception of a plugin. A server that was not asked for C2T can go on without it; one
    that was fails at selection, since the name is unknown. The CPU engine has no such second line of defence, so its
    errors end the process.
    """
    if envs.cpu_engine():
        _apply_cpu_engine()
    from c2t_plugin.engines.sglang import algo, patches

    algo.register()
    patches.PATCHES.apply(patches.LOAD)


def _apply_cpu_engine() -> None:
    try:
        from c2t_plugin.engines.sglang.cpu_engine import patches

        patches.apply()
    except (C2TError, ImportError, AttributeError) as error:
        raise SystemExit(f"C2T: the CPU engine could not be set up: {error}") from error
