"""Entry point `sglang.srt.plugins` of the CPU engine: found in every process that has this folder on its path."""

from __future__ import annotations

from c2t_plugin.errors import C2TError


def register() -> None:
    """Patch SGLang for the CPU engine. Idempotent.

    SGLang logs and swallows any Exception of a plugin, and a server without these patches would go on: so an error here
    ends the process.
    """
    try:
        from . import patches

        patches.apply()
    except (C2TError, ImportError, AttributeError) as error:
        raise SystemExit(f"C2T: the CPU engine could not be set up: {error}") from error
