"""Where the draft cannot read plain steps later: looked at once, at start, see behind.py."""

from __future__ import annotations

from typing import Any

from c2t_plugin.engines.sglang import contract, ranks


def why(server_args: Any, draft: Any) -> str:
    """Why what plain steps give cannot be read later; empty: it can. draft: SGLang's draft worker."""
    broken = contract.missing_for_plain_steps()
    for found, reason in (
        (bool(broken), f"this release of SGLang lacks what it takes to do that later ({''.join(broken[:1])})"),
        (getattr(server_args, "disaggregation_mode", "null") not in (None, "null"), "disaggregation"),
        (ranks.apart(), "DP attention, where all ranks would have to do so in the same step"),
        (getattr(server_args, "enable_mixed_chunk", False), "chunks of prompts run together with steps"),
        (getattr(server_args, "enable_streaming_session", False), "sessions keep the slots of texts that have ended"),
        (draft.draft_runner.model_config.model_is_mrope, "the draft's positions have several axes"),
        (draft.seed_dsa_topk_from_draft_extend, "the draft's attention is seeded by that pass"),
    ):
        if found:
            return reason
    return ""
