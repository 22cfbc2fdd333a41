"""How much of plain steps is kept until a draft reads it, the same on both engines."""

from __future__ import annotations

# Plain steps. A planner's probes draft more often, as a rule.
MOST_STEPS = 64
# Of hidden states that are kept, unless one step of the largest batch has more: 12 kB a token at a hidden size of 2048.
MOST_BYTES = 64 * 2**20


def room(requests: int, token_bytes: int, chunk: int = -1) -> int:
    """Tokens that are kept at most, a step's at least. requests: of the largest batch. token_bytes: of a token's hidden
    state. chunk: tokens that one pass may read; -1: any."""
    most = MOST_STEPS * requests if chunk < 0 else min(MOST_STEPS * requests, chunk)
    return max(min(most, MOST_BYTES // token_bytes) if token_bytes else most, requests)
