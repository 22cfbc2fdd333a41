"""What a table of patches has bound in this process, taken back, so that the next test finds the engine's own."""

from __future__ import annotations

from collections.abc import Callable

from c2t_plugin.engines.patching import Patch, Table, _get, _set


def undone(table: Table, unhook: Callable[[Patch], None] | None = None) -> None:
    """The newest first. What somebody else has bound since stays, and what is bound on an object. unhook: takes a hook
    out of the engine's registry."""
    for patch, (stock, ours) in reversed(table._applied.items()):
        if patch.hook:
            assert unhook is not None
            unhook(patch)
        elif _get(patch.owner, patch.name) is ours:
            _set(patch.owner, patch.name, stock)
    for each in (table._applied, table._told, table._noticed):
        each.clear()


def sglang_undone() -> None:
    """Of SGLang's, its hooks too."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from c2t_plugin.engines.sglang.patches import PATCHES

    def unhook(patch: Patch) -> None:
        hooks = HookRegistry._hooks[patch.dotted]
        hooks[:] = [each for each in hooks if each[1] is not patch.handler]

    undone(PATCHES, unhook)
