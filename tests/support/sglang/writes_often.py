"""A plugin for tests only: recorded drafts are in their file half a second after the request has ended."""

from __future__ import annotations


def register() -> None:
    from c2t_plugin.traces import recorder

    # Fails where the name is gone.
    assert recorder.WRITE_EVERY_S
    recorder.WRITE_EVERY_S = 0.5
    print("planted: recorded drafts are written often", flush=True)
