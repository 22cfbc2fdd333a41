"""Entry point `sglang.srt.plugins`: called in every SGLang process, before arguments are parsed."""

from __future__ import annotations


def register() -> None:
    """Register C2T's algorithms and options with SGLang. Idempotent; imports no worker.

    SGLang logs and swallows any Exception of a plugin. A server that was not asked for C2T can go on without it; one
    that was fails at selection, since the name is unknown.
    """
    from c2t_plugin.engines.sglang import algo, patches

    # the name last: a process whose hooks could not be registered does not know it
    patches.PATCHES.apply(patches.LOAD)
    algo.register()
