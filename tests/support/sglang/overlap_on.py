"""A plugin for tests only: the overlap scheduler stays on, which SGLang turns off for speculative decoding on a CPU."""

from __future__ import annotations


def register() -> None:
    from sglang.srt.arg_groups import speculative_hook

    # Fails where the name is gone.
    assert speculative_hook._disable_overlap_schedule_for_cpu
    speculative_hook._disable_overlap_schedule_for_cpu = lambda server_args: None
    print("planted: the overlap scheduler", flush=True)
